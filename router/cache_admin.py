"""`/admin/cache/*`: what the stores of all nodes hold, where a prompt's chunks are, and changes to that.

Every node is asked at once, and one that does not answer is told of in the answer: it fails nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar
from urllib.parse import parse_qs

import msgspec

from cache_store.cache_messages import (
    EVICT_PATH,
    LIST_PATH,
    MAX_LISTED,
    PIN_PATH,
    STATS_PATH,
    UNPIN_PATH,
    WHERE_PATH,
    Affected,
    KeysRequest,
    Where,
)
from cache_store.events import ChunkKey, pack_keys
from cache_store.store_stats import ChunkInfo, StoreStats
from router import errors
from router.asgi import Scope, read_body, send_bytes
from router.cache_answers import (
    Changed,
    ChunkPlaces,
    ListedChunk,
    Listing,
    Lookup,
    NamedChunks,
    Problems,
    Stats,
    totals,
)
from router.cache_directory import CacheEntry, CacheUnavailable
from router.cache_warming import Refused, Run, warm
from router.client import Receive, Send
from router.core import Query, RouterCore
from router.errors import ApiError
from router.named_chunks import (
    AllNamed,
    EngineChunks,
    KeysNamed,
    PromptNamed,
    check_prompt,
    check_tenant,
    engine_chunks,
    node_named,
    parse_named,
    parse_warm,
)

Serve = Callable[[Scope, Receive, Send], Awaitable[None]]
MakeQuery = Callable[[str, bytes, str, dict[bytes, bytes]], Awaitable[Query]]
"""Path, body, tenant and headers of a request. Raises ApiError, as for a client's."""
T = TypeVar("T")

_DEFAULT_LISTED = 100
_RETRY_AFTER_S = 1.0


class _Told(NamedTuple, Generic[T]):
    answers: dict[str, T]
    """By node."""
    problems: Problems


class _Prompt(NamedTuple):
    """A prompt's chunks, for every kind of engine that serves its model."""

    tokens: int
    shareable: int
    engines: list[EngineChunks]


class CacheAdmin:
    """The pages, by path. Whoever serves them asks for the admin key first."""

    def __init__(self, core: RouterCore, make_query: MakeQuery, run: Run) -> None:
        self._core = core
        self._make_query = make_query
        self._run = run
        self.reads: dict[str, Serve] = {"/admin/cache/stats": self._stats, "/admin/cache/ls": self._ls}
        self.posts: dict[str, Serve] = {
            "/admin/cache/lookup": self._lookup,
            "/admin/cache/pin": self._changing(PIN_PATH),
            "/admin/cache/unpin": self._changing(UNPIN_PATH),
            "/admin/cache/evict": self._changing(EVICT_PATH),
            "/admin/cache/warm": self._warm,
        }

    async def _stats(self, scope: Scope, receive: Receive, send: Send) -> None:
        _parameters(scope, ())
        told = await self._ask("GET", STATS_PATH, StoreStats)
        nodes = list(told.answers.values())
        hbm = self._core.index.stats().get("hbm")
        held = dict(hbm.chunks) if hbm is not None else {}
        await _send(send, Stats(nodes, totals(nodes), held, told.problems))

    async def _ls(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _parameters(scope, ("limit", "node"))
        limit = given.get("limit", str(_DEFAULT_LISTED))
        if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LISTED:
            message = f"limit: found {limit!r:.80}; needed: a number from 1 to {MAX_LISTED}"
            raise errors.bad_request(message, param="limit")
        caches = self._caches()
        if "node" in given:
            node = node_named(given["node"], {entry.info.node: entry for entry in caches})
            caches = [entry for entry in caches if entry.info.node == node]
        # One more than is asked for tells whether there is more.
        asked = min(int(limit) + 1, MAX_LISTED)
        told = await self._ask("GET", f"{LIST_PATH}?limit={asked}", list[ChunkInfo], caches=caches)
        chunks = [
            ListedChunk(**msgspec.structs.asdict(chunk), node=node)
            for node, listed in told.answers.items()
            for chunk in listed
        ]
        chunks.sort(key=lambda chunk: (chunk.idle_s, chunk.key, chunk.node))
        kept = chunks[: int(limit)]
        more = len(chunks) > len(kept) or any(len(listed) == asked for listed in told.answers.values())
        await _send(send, Listing(kept, more, told.problems))

    async def _lookup(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._caches()
        named = parse_named(await self._body(scope, receive))
        prompt = await self._chunks(named)
        keys = _union(prompt)
        asked = KeysRequest(pack_keys(keys))
        told = await self._ask("POST", WHERE_PATH, Where, asked) if keys else _Told[Where]({}, {})
        stores = {node: dict(zip(keys, where.tiers, strict=False)) for node, where in told.answers.items()}
        engines = [self._places(kind, stores) for kind in prompt.engines]
        await _send(send, Lookup(prompt.tokens, prompt.shareable, engines, told.problems))

    def _places(self, kind: EngineChunks, stores: dict[str, dict[ChunkKey, tuple[str, ...]]]) -> NamedChunks:
        """`stores`: by node, the tiers that each chunk is in."""

        def nodes(key: ChunkKey, tier: str) -> list[str]:
            return [node for node, held in stores.items() if tier in held.get(key, ())]

        def replicas(key: ChunkKey) -> list[str]:
            hbm = self._core.index.match([key]).tiers.get("hbm")
            return sorted(hbm.leading) if hbm is not None else []

        size = kind.chunk_tokens
        chunks = [
            ChunkPlaces(
                key=key.hex(),
                tokens=number * size,
                hbm=replicas(key),
                dram=nodes(key, "dram"),
                disk=nodes(key, "disk"),
                remote=nodes(key, "remote"),
            )
            for number, key in enumerate(kind.keys, 1)
        ]
        covered = next((number for number, chunk in enumerate(chunks) if not chunk.held), len(chunks))
        return NamedChunks(kind.identity.hex(), size, kind.replicas, chunks, covered * size)

    def _changing(self, path: str) -> Serve:
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            self._caches()
            named = parse_named(await self._body(scope, receive), may_be_all=path == EVICT_PATH)
            if isinstance(named, AllNamed):
                keys, count = list[ChunkKey](), None
            else:
                keys = _union(await self._chunks(named))
                count = len(keys)
            # To a node, no keys stand for all chunks: a prompt too short to have one is not sent.
            if count == 0:
                told = _Told[Affected]({entry.info.node: Affected(0) for entry in self._core.caches}, {})
            else:
                told = await self._ask("POST", path, Affected, KeysRequest(pack_keys(keys)))
            nodes = {node: affected.chunks for node, affected in told.answers.items()}
            await _send(send, Changed(count, nodes, told.problems))

        return serve

    async def _warm(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._caches()
        prompt, wait_s = parse_warm(await self._body(scope, receive))
        query = await self._query(prompt)
        try:
            await _send(send, await warm(self._core, self._run, prompt, query, wait_s, receive))
        except Refused as error:
            await send_bytes(send, error.status, error.body, "application/json")

    async def _chunks(self, named: PromptNamed | KeysNamed | AllNamed) -> _Prompt:
        if isinstance(named, KeysNamed):
            return _Prompt(0, 0, [EngineChunks(b"", 0, [], named.keys)])
        assert isinstance(named, PromptNamed)
        query = await self._query(named)
        tokens = check_prompt(query)
        engines = engine_chunks(query, self._core.directory)
        if not engines:
            raise errors.no_replica(
                f"what a prompt's chunks are called is known from the engines of {query.model or 'a model'}, and none "
                "has been heard yet",
                _RETRY_AFTER_S,
            )
        return _Prompt(tokens, min(tokens, query.rendered.shareable[0]), engines)

    async def _query(self, prompt: PromptNamed) -> Query:
        tenant = check_tenant(prompt.tenant, self._core.config.tenants)
        return await self._make_query(prompt.path, prompt.body, tenant, {})

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        return await read_body(receive, dict(scope["headers"]), self._core.config.limits.max_body_bytes)

    def _caches(self) -> list[CacheEntry]:
        """Raises ApiError 409 where there are none."""
        caches = list(self._core.caches)
        if not caches:
            raise ApiError(
                409,
                "No node of this cluster has a cache, so that there is nothing here but what engines hold themselves. "
                "`cache.share: auto` in the configuration turns it on; a node's cache starts with its first replica.",
                "ConflictError",
            )
        return caches

    async def _ask(
        self,
        method: str,
        path: str,
        answer: type[T],
        body: msgspec.Struct | None = None,
        caches: list[CacheEntry] | None = None,
    ) -> _Told[T]:
        """Ask these nodes, or all."""
        asked = self._caches() if caches is None else caches

        async def one(entry: CacheEntry) -> T | CacheUnavailable:
            try:
                return await self._core.caches.ask(entry, method, path, answer, body)
            except CacheUnavailable as error:
                return error

        answers = dict(zip([e.info.node for e in asked], await asyncio.gather(*map(one, asked)), strict=True))
        return _Told(
            {node: told for node, told in answers.items() if not isinstance(told, CacheUnavailable)},
            {node: str(told) for node, told in answers.items() if isinstance(told, CacheUnavailable)},
        )


def _union(prompt: _Prompt) -> list[ChunkKey]:
    return list(dict.fromkeys(key for kind in prompt.engines for key in kind.keys))


def _parameters(scope: Scope, known: tuple[str, ...]) -> dict[str, str]:
    """Of the query string. Raises ApiError 400 for one that is not known."""
    given = parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    for name in given:
        if name not in known:
            needed = f"needed: {' or '.join(known)}" if known else "there are none here"
            raise errors.bad_request(f"{name!r:.80} is no parameter of this page; {needed}", param=name[:80])
    return {name: values[-1] for name, values in given.items()}


async def _send(send: Send, answer: msgspec.Struct) -> None:
    await send_bytes(send, 200, msgspec.json.encode(answer), "application/json")
