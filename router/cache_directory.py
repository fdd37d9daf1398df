"""The nodes' cache actors: what each of them holds is in the index, and what they can be asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import aiohttp
import msgspec

from cache_store.cache_messages import PREFETCH_PATH, CacheInfo, KeysRequest
from cache_store.events import ChunkKey, pack_keys
from cache_store.wire import Source
from router.event_stream import EventStream, Session
from router.index import PrefixIndex

logger = logging.getLogger(__name__)

MAX_PREFETCHES = 64
"""Under way at once; what comes on top is left to the engine's own look-up."""
_PREFETCH_TIMEOUT_S = 2.0
_ASK_TIMEOUT_S = 10.0
T = TypeVar("T")


class CacheUnavailable(ConnectionError):
    """A cache actor did not answer. The message names it."""


@dataclass
class CacheEntry:
    info: CacheInfo
    stream: EventStream


class CacheDirectory:
    """Cache actors by node. All methods belong to one event loop."""

    def __init__(self, index: PrefixIndex, secret: str, silence_s: Callable[[], float]) -> None:
        self.prefetches_dropped = 0
        self._index = index
        self._session = Session(secret)
        self._silence_s = silence_s
        self._entries: dict[str, CacheEntry] = {}
        self._prefetches: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[CacheEntry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def holder(self, node: str) -> str:
        """Holder id of a node's cache; empty for none."""
        entry = self._entries.get(node)
        return entry.info.id if entry is not None else ""

    def nodes(self) -> dict[str, str]:
        """Holder id -> node."""
        return {entry.info.id: node for node, entry in self._entries.items()}

    def update(self, infos: Sequence[CacheInfo]) -> None:
        """Take over the set of cache actors that exist."""
        named = {info.node: info for info in infos}
        for node in [n for n, e in self._entries.items() if named.get(n) != e.info]:
            self._entries.pop(node).stream.close()
        for node, info in named.items():
            if node not in self._entries:
                stream = EventStream(
                    info.id, info.address, self._index, self._session, self._silence_s,
                    on_heard=_nothing, on_load=_nothing, on_lost=_nothing,
                )  # fmt: skip
                self._entries[node] = CacheEntry(info, stream)
                stream.open()

    def prefetch(
        self, node: str, keys: Sequence[ChunkKey], sources: Sequence[Source], ranks: int = 1
    ) -> None:
        """Have a node begin to move these chunks, of `ranks` parts each, to its memory; nobody waits for it."""
        entry = self._entries.get(node)
        if entry is None or not entry.stream.connected:
            return
        if len(self._prefetches) >= MAX_PREFETCHES:
            self.prefetches_dropped += 1
            return
        asked = KeysRequest(pack_keys(keys), tuple(sources), ranks)
        task = asyncio.create_task(self._prefetch(entry, asked))
        self._prefetches.add(task)
        task.add_done_callback(self._prefetches.discard)

    async def _prefetch(self, entry: CacheEntry, asked: KeysRequest) -> None:
        try:
            await self._ask(entry, "POST", PREFETCH_PATH, _PREFETCH_TIMEOUT_S, asked)
        except CacheUnavailable as error:
            logger.info("no prefetch: %s", error)

    async def ask(
        self, entry: CacheEntry, method: str, path: str, answer: type[T], body: msgspec.Struct | None = None
    ) -> T:
        """One request, within a time limit. Raises CacheUnavailable."""
        data = await self._ask(entry, method, path, _ASK_TIMEOUT_S, body)
        try:
            return msgspec.msgpack.decode(data, type=answer)
        except msgspec.DecodeError as error:
            raise CacheUnavailable(f"{entry.info.id} gave no answer of this version: {error}") from error

    async def _ask(
        self, entry: CacheEntry, method: str, path: str, limit_s: float, body: msgspec.Struct | None
    ) -> bytes:
        data = msgspec.msgpack.encode(body) if body is not None else None
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._session.request(method, entry.info.address, path, timeout, data=data) as answer:
                answer.raise_for_status()
                return await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise CacheUnavailable(
                f"{entry.info.id} did not answer: {str(error) or type(error).__name__}"
            ) from error

    async def close(self) -> None:
        tasks = [entry.stream.close() for entry in self._entries.values()]
        self._entries = {}
        for task in self._prefetches:
            task.cancel()
        await asyncio.gather(*filter(None, tasks), *self._prefetches, return_exceptions=True)
        await self._session.close()


def _nothing(*_: object) -> None: ...
