"""One real vLLM engine with its OpenAI application, in this process, and one renderer without an engine.

They are started once for the whole session with the same arguments, and live on the session's event loop:
tests that use them carry `asyncio(loop_scope="session")`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from cluster.render_vllm import VllmRenderer
from tests.tiny_model import make_tiny_model
from workers.request_record import RequestRecord, current_request
from workers.vllm.arguments import parse_engine_args

MODEL = "tiny"
CONTEXT = 1024

# Tools, a variable of the client's and the end of the last message all show in the text.
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% if mood is defined %}<|im_start|>mood\n{{ mood }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def vllm_environment() -> Iterator[None]:
    """Has to stand before vLLM and torch are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", str(max(os.sched_getaffinity(0))))
        yield


@pytest.fixture(scope="session")
def cores() -> set[int]:
    """Cores of this process before any of vLLM was started in it."""
    return os.sched_getaffinity(0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def engine_args(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE, encoding="utf-8")
    return {
        "max-model-len": CONTEXT,
        "dtype": "float32",
        "enforce-eager": True,
        "kv-cache-memory-bytes": 64 * 1024 * 1024,
        "distributed-executor-backend": "uni",
        "chat-template": str(template),
        "enable-auto-tool-choice": True,
        "tool-call-parser": "hermes",
        "enable-prompt-tokens-details": True,
    }


@dataclass
class TinyServer:
    """vLLM's own server, without a network."""

    llm: Any
    client: httpx.AsyncClient
    adapter: Any
    inputs: list[dict[str, Any]] = field(default_factory=list)
    """What the engine was given, newest last."""

    async def post(
        self, path: str, body: dict[str, Any] | bytes, record: RequestRecord | None = None
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        token = current_request.set(record)
        try:
            return await self.client.post(path, content=content, headers={"content-type": "application/json"})
        finally:
            current_request.reset(token)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(
    vllm_environment: None, tiny_model: Path, engine_args: dict[str, Any]
) -> AsyncIterator[TinyServer]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.v1.engine.async_llm import AsyncLLM

    from workers.vllm.prompt_adapter import install

    args = parse_engine_args(str(tiny_model), MODEL, engine_args)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(args))
    adapter = install(llm.renderer)
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as client:
        server = TinyServer(llm, client, adapter)
        _watch_inputs(server)
        yield server
    await asyncio.to_thread(llm.shutdown)


def _watch_inputs(server: TinyServer) -> None:
    generate = server.llm.generate

    def watched(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        server.inputs.append(dict(prompt))
        return generate(prompt, *args, **kwargs)

    server.llm.generate = watched


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def renderer(
    vllm_environment: None, cores: set[int], tiny_model: Path, engine_args: dict[str, Any]
) -> VllmRenderer:
    renderer = VllmRenderer(str(tiny_model), engine_args)
    await renderer.start()
    return renderer
