"""A real engine that shares its KV through a store of the tests', and its server without a network."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from cache_store.config import CacheConfig
from cache_store.events import ChunkKey
from cache_store.keys import chunk_keys, namespace
from tests.engine.store_thread import StoreThread
from workers.config import EngineConfig, ModelConfig
from workers.messages import Plan
from workers.request_record import RequestRecord, current_request
from workers.store_address import StoreAddress
from workers.vllm.engine import VllmEngine

DEADLINE_S = 30.0
BLOCK, CHUNK = 32, 256
CHUNKS = 7
PROMPT = [(7 * at + at * at // 5) % 400 + 3 for at in range(CHUNKS * CHUNK + 2)]
"""Whole chunks and two tokens."""
SLOTS = 8
"""In a worker's staging area, so that a few that were lost would show."""
PART_BYTES = CHUNK * 2 * 2 * 32 * 4
"""Of a chunk of the tiny model: keys and values of two layers, in float32."""
ARGS = {
    "max-model-len": 2560,
    "dtype": "float32",
    "block-size": BLOCK,
    "enforce-eager": True,
    "kv-cache-memory-bytes": 16 * 1024 * 1024,
    "distributed-executor-backend": "uni",
    # Prompts of several chunks are computed in several steps.
    "max-num-batched-tokens": 512,
    "max-num-seqs": 16,
}


@dataclass
class Answer:
    tokens: list[int]
    cached: dict[str, int]
    """Tokens by tier, as the header says."""


@dataclass
class Served:
    engine: VllmEngine
    client: httpx.AsyncClient
    store: StoreThread

    async def post(
        self, path: str, body: dict[str, Any], salt: str = "", plan: Plan | None = None
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """The answer's body, and the prompt's tokens by tier."""
        record = RequestRecord("test", salt=salt, plan=plan)
        token = current_request.set(record)
        try:
            answer = await self.client.post(path, json={"model": "tiny", "temperature": 0} | body)
        finally:
            current_request.reset(token)
        assert answer.status_code == 200, answer.text
        parts = (part.split("=") for part in record.cached_header.split(","))
        return answer.json(), {name: int(count) for name, count in parts}

    async def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int = 24,
        salt: str = "",
        plan: Plan | None = None,
        **options: Any,
    ) -> Answer:
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "return_token_ids": True} | options
        content, cached = await self.post("/v1/completions", body, salt, plan)
        assert sum(cached.values()) == len(prompt)
        told = content["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert told == len(prompt) - cached["computed"]
        return Answer(content["choices"][0]["token_ids"], cached)

    async def ask_and_leave(self, prompt: Sequence[int], leave: asyncio.Event) -> None:
        """A client that closes its connection when it is told to; returns when the server has noticed."""
        body = json.dumps({"model": "tiny", "prompt": list(prompt), "max_tokens": 24}).encode()
        received = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if received:
                return received.pop()
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            assert leave.is_set(), message

        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "root_path": "", "query_string": b"",
            "headers": headers, "client": ("client", 1), "server": ("engine", 80),
        }  # fmt: skip
        await self.engine.app(scope, receive, send)  # type: ignore[arg-type]

    def keys(self, tokens: Sequence[int], adapter: str = "", salt: str = "") -> list[ChunkKey]:
        identity = self.engine.info.identity
        return chunk_keys(namespace(identity.digest(), adapter, salt), tokens, identity.chunk_tokens)

    async def metrics(self) -> dict[str, float]:
        """By name with labels. Of the engine that was started last: all of this process share a page."""
        page = (await self.client.get("/metrics")).text
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    async def metric(self, name: str, *labels: str) -> float:
        """The sum of those that have all of the labels."""
        return sum(
            value
            for full, value in (await self.metrics()).items()
            if full.partition("{")[0] == name and all(label in full for label in labels)
        )

    async def counts(self) -> Counter[str]:
        """The engine's counts of KV, by name and label."""
        counts: Counter[str] = Counter()
        for full, value in (await self.metrics()).items():
            name, _, rest = full.partition("{")
            if (name.startswith("manta_kv_") and name.endswith("_total")) or name.endswith(
                "preemptions_total"
            ):
                labels = dict(pair.split("=") for pair in rest.rstrip("}").split(","))
                label = next(
                    (v.strip('"') for k, v in labels.items() if k in ("tier", "outcome", "reason")), ""
                )
                kind = name.removeprefix("manta_kv_").removesuffix("_total")
                counts[f"{kind} {label}".strip()] += int(value)
        return counts

    async def saved(self, tokens: Sequence[int], **names: str) -> None:
        """All whole chunks of `tokens` are in the store's memory."""
        keys = set(self.keys(tokens, **names))
        await eventually(lambda: keys <= self.store.in_memory)

    async def blocks_free(self) -> None:
        """No block is in use. Of the engine that was started last."""

        async def free() -> bool:
            return not await self.metric("vllm:kv_cache_usage_perc")

        await eventually(free)

    async def at_rest(self) -> None:
        """Nothing of a request is left in store or engine. Of the engine that was started last."""
        await eventually(self.store.nothing_open)
        await self.blocks_free()

    async def forget(self) -> None:
        """Nothing of a request is left in store or engine, and the engine's blocks, all free, hold no prefix."""
        await eventually(self.store.nothing_open)
        # False while a block is in use.
        await eventually(self.engine._llm.reset_prefix_cache)


async def eventually(what: Callable[[], Any]) -> None:
    """Waits until it is true; what it returns may be awaited."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = what()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.02)


@asynccontextmanager
async def serving(
    model: Path,
    store: StoreThread,
    adapters: dict[str, Path] | None = None,
    connector: dict[str, Any] | None = None,
    module: str = "",
    share: Literal["on", "auto"] = "on",
    **args: Any,
) -> AsyncIterator[Served]:
    """An engine of the tiny model, with the store's chunks. `connector` are further settings of the KV connector,
    `module` another one."""
    engine = VllmEngine(
        EngineConfig(kind="vllm", device="cpu", args={**ARGS, **args}),
        ModelConfig(
            path=str(model),
            name="tiny",
            adapters={name: str(path) for name, path in (adapters or {}).items()},
        ),
        CacheConfig(chunk_tokens=store.chunk_tokens, share=share, staging_mib=1),
        store=StoreAddress(str(store.socket), "engine", load_when="always"),
    )
    try:
        with _configured(connector or {}, module):
            await engine.start(lambda events: None)
        transport = httpx.ASGITransport(engine.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=120) as client:
            yield Served(engine, client, store)
    finally:
        await engine.shutdown()


@contextmanager
def _configured(settings: dict[str, Any], module: str) -> Iterator[None]:
    from workers.vllm import transfer_config

    make = transfer_config.transfer_config

    def changed(args: Any, extra_config: Any) -> dict[str, Any]:
        config = make(args, {**extra_config, **settings})
        return config | {"kv_connector_module_path": module} if module else config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer_config, "transfer_config", changed)
        yield
