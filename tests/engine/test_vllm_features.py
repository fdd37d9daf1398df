"""Ways to run an engine that change what its KV is or how its tokens come: supported, and told apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from cache_store.config import CacheConfig
from cache_store.events import ChunkKey
from cache_store.keys import chunk_keys, namespace
from router.render import COMPLETIONS_PATH
from tests.engine.conftest import MODEL, TinyServer
from workers.chunk_tracker import ChunkTracker
from workers.config import EngineConfig, ModelConfig
from workers.kv_events import BlocksStored, KVEvent
from workers.vllm.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

BLOCK, CHUNK = 32, 64
ARGS = {
    "max-model-len": 1024,
    "dtype": "float32",
    "block-size": BLOCK,
    "enforce-eager": True,
    "kv-cache-memory-bytes": 64 * 1024 * 1024,
    "distributed-executor-backend": "uni",
}
PROMPT = "one, two, three, four, five, six, seven; " * 12


@dataclass
class Started:
    """An engine, its server without a network, and the events that it has sent."""

    engine: VllmEngine
    client: httpx.AsyncClient
    events: list[KVEvent] = field(default_factory=list)

    async def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 200, "temperature": 0}
        answer = await self.client.post("/v1/completions", json=body | {"return_token_ids": True} | options)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    async def metric(self, name: str) -> float:
        page = (await self.client.get("/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))

    async def eventually(self, what: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not what():  # noqa: ASYNC110 - the condition is of plain data, with no event to wait for
                await asyncio.sleep(0.02)


@asynccontextmanager
async def started(model: Path, **args: Any) -> AsyncIterator[Started]:
    config = EngineConfig(kind="vllm", device="cpu", args=ARGS | args)
    engine = VllmEngine(config, ModelConfig(path=str(model), name="tiny"), CacheConfig(chunk_tokens=CHUNK))
    events: list[KVEvent] = []
    try:
        await engine.start(events.extend)
        transport = httpx.ASGITransport(engine.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as client:
            yield Started(engine, client, events)
    finally:
        await engine.shutdown()


def keys(engine: Started, tokens: Sequence[int]) -> list[ChunkKey]:
    return chunk_keys(namespace(engine.engine.info.identity.digest()), tokens, CHUNK)


async def test_speculative_decoding_answers_the_same_and_keys_no_guess(
    server: TinyServer, tiny_model: Path
) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "temperature": 0, "return_token_ids": True}
    expected = (await server.post(COMPLETIONS_PATH, body)).json()
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    async with started(tiny_model, **{"speculative-config": config}) as engine:
        answer = await engine.complete(PROMPT)
        assert answer["choices"] == expected["choices"]
        assert answer["usage"]["completion_tokens"] == 200
        assert await engine.metric("vllm:spec_decode_num_draft_tokens_total") > 0
        choice = answer["choices"][0]
        tokens = choice["prompt_token_ids"] + choice["token_ids"]
        # The last token was sampled and never computed.
        whole = set(keys(engine, tokens[:-1]))
        found: set[ChunkKey] = set()
        tracker = ChunkTracker(engine.engine.info.identity.digest(), BLOCK, CHUNK)
        taken = 0

        def there() -> bool:
            nonlocal taken
            new, taken = engine.events[taken:], len(engine.events)
            found.update(tracker.apply(new).added)
            return whole <= found

        await engine.eventually(there)
        assert found == whole, "a guess that was not taken has been keyed"


async def test_kv_in_fp8_is_in_a_namespace_of_its_own(server: TinyServer, tiny_model: Path) -> None:
    async with started(tiny_model, **{"kv-cache-dtype": "fp8"}) as engine:
        answer = await engine.complete(PROMPT)
        assert answer["usage"]["completion_tokens"] == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        await engine.eventually(lambda: any(isinstance(event, BlocksStored) for event in engine.events))
        again = await engine.complete(PROMPT)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert again["choices"] == answer["choices"]
        identity = engine.engine.info.identity
        assert identity.kv_dtype == "fp8"
        wide = msgspec.structs.replace(identity, kv_dtype="float32")
        assert not set(keys(engine, range(CHUNK))) & set(
            chunk_keys(namespace(wide.digest()), range(CHUNK), CHUNK)
        )
