"""Replicas with real engines that hand prompts over to each other, spoken to as a router does."""

from __future__ import annotations

import json
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from cache_store.app_server import AppServer, bound_socket
from cache_store.config import CacheConfig
from router.config import RouterConfig
from router.core import RouterCore
from router.headers import parse_cached
from router.http import RouterApp
from router.routes import ROUTES
from tests.engine.served import eventually
from tests.engine.store_thread import StoreThread
from workers.config import EngineConfig, ModelConfig
from workers.hosted import HostedReplica
from workers.messages import (
    CACHED_HEADER,
    FETCH_HEADER,
    HANDOVER_HEADER,
    HANDOVERS_PATH,
    HELD,
    LENGTHS_HEADER,
    SALT_HEADER,
    SECRET_HEADER,
    Handover,
    Role,
    pack_handover,
    pack_prompts,
    unpack_handover,
)
from workers.store_address import StoreAddress
from workers.transfer import TransferConfig
from workers.vllm.engine import VllmEngine

SECRET = "the-secret-of-this-cluster"
BLOCK, CHUNK = 32, 64
ARGS = {
    "max-model-len": 6400,
    "dtype": "float32",
    "block-size": BLOCK,
    "enforce-eager": True,
    "kv-cache-memory-bytes": 64 * 1024 * 1024,
    "distributed-executor-backend": "uni",
    "max-num-batched-tokens": 2048,
    "max-num-seqs": 16,
}


@dataclass
class Answer:
    tokens: list[list[int]]
    """Of each choice."""
    cached: dict[str, int]
    """Tokens of the prompt by where their KV came from, and those computed."""
    body: dict[str, Any]


@dataclass
class Replica:
    hosted: HostedReplica
    engine: VllmEngine
    server: AppServer
    client: httpx.AsyncClient

    async def post(
        self,
        path: str,
        body: dict[str, Any],
        prompt: Sequence[int] | None = None,
        fetch: Handover | None = None,
        **headers: str,
    ) -> httpx.Response:
        """As a router does: the ids behind the body, and the hand-over behind those."""
        data = json.dumps({"model": "tiny", "temperature": 0} | body).encode()
        sent = {SECRET_HEADER: SECRET, "content-type": "application/json"} | headers
        if prompt is not None:
            data, sent[LENGTHS_HEADER] = pack_prompts(data, [array("I", prompt)])
        if fetch is not None:
            packed = pack_handover(fetch)
            data, sent[FETCH_HEADER] = data + packed, str(len(packed))
        return await self.client.post(path, content=data, headers=sent)

    async def first_half(
        self, prompt: Sequence[int], salt: str = "", name: str = "", **body: Any
    ) -> httpx.Response:
        headers = {HANDOVER_HEADER: name or uuid.uuid4().hex, SALT_HEADER: salt}
        return await self.post("/v1/completions", {"prompt": "p", **body}, prompt, **headers)

    async def keeps(self, prompt: Sequence[int], salt: str = "", **body: Any) -> Handover:
        answer = await self.first_half(prompt, salt, **body)
        assert (answer.status_code, answer.headers[HANDOVER_HEADER]) == (200, HELD), answer.text
        return unpack_handover(answer.content)

    async def end(self, handover: Handover) -> int:
        path = HANDOVERS_PATH + handover.name
        return (await self.client.delete(path, headers={SECRET_HEADER: SECRET})).status_code

    async def complete(
        self,
        prompt: Sequence[int],
        fetch: Handover | None = None,
        salt: str = "",
        max_tokens: int = 16,
        **body: Any,
    ) -> Answer:
        body = {"prompt": "p", "max_tokens": max_tokens, "return_token_ids": True} | body
        answer = await self.post("/v1/completions", body, prompt, fetch, **{SALT_HEADER: salt})
        assert answer.status_code == 200, answer.text
        content = answer.json()
        cached = parse_cached(answer.headers[CACHED_HEADER])
        return Answer([choice["token_ids"] for choice in content["choices"]], cached, content)

    async def holds_nothing(self) -> None:
        """No block is in use."""
        await eventually(lambda: self.engine.load().kv_used == 0)

    async def forget(self) -> None:
        """No block is in use, and none holds a prefix."""
        await eventually(self.engine._llm.reset_prefix_cache)

    async def fetched_tokens(self) -> float:
        """So far, by the engine's own count. Of the engine that was started last: all of this process share a page."""
        page = (await self.client.get("/metrics", headers={SECRET_HEADER: SECRET})).text
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.startswith("vllm:prompt_tokens_by_source_total")
            and 'source="external_kv_transfer"' in line
        )


def shortened(handover: Handover, hold_s: float) -> Handover:
    return msgspec.structs.replace(handover, hold_s=hold_s)


@asynccontextmanager
async def replica(
    role: Role, model: Path, store: StoreThread, transfer: TransferConfig | None = None, **args: Any
) -> AsyncIterator[Replica]:
    cache = CacheConfig(chunk_tokens=store.chunk_tokens, staging_mib=1, share="on")
    engine = VllmEngine(
        EngineConfig(kind="vllm", device="cpu", args={**ARGS, **args}),
        ModelConfig(path=str(model), name="tiny"),
        cache,
        store=StoreAddress(str(store.socket), role, load_when="always"),
        transfer=transfer or TransferConfig(kind="nixl"),
    )
    hosted = HostedReplica(f"{role}-{time.monotonic_ns()}", role, engine, cache, SECRET)
    server = None
    try:
        await hosted.start()
        server = AppServer([hosted.app], [bound_socket("127.0.0.1")])
        await server.start()
        url = f"http://{server.addresses[0]}"
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as client:
            yield Replica(hosted, engine, server, client)
    finally:
        if server is not None:
            await server.stop()
        await hosted.stop()


@asynccontextmanager
async def router_before(
    replicas: Sequence[Replica], renderer: Any, **prefill: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router that knows these replicas; `prefill` is its section of that name."""
    core = RouterCore(RouterConfig.model_validate({"prefill": prefill}), SECRET, ROUTES)

    async def wake() -> None: ...

    async def describe() -> dict[str, Any]:
        return {}

    app = RouterApp(core, renderer, SECRET, ("tiny",), wake, describe, {})
    server = AppServer([app], [bound_socket("127.0.0.1")])
    await server.start()
    infos = [
        each.hosted.describe("node", address) for each in replicas for address in each.server.addresses[:1]
    ]
    core.set_pool("all", infos)
    try:
        await eventually(lambda: len(core.directory.ready()) == len(replicas))
        url = f"http://{server.addresses[0]}"
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as client:
            yield client
        await eventually(lambda: not core.ledger.open_requests() and not app._ends.open)
        core.ledger.check_integrity()
    finally:
        await server.stop()
        await app.close()
