"""Writing chunks to the files of a tier: bounded, and making room for them first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from cache_store.admission import Admission
from cache_store.chunk import ChunkError, Header
from cache_store.entries import Entries, Kind
from cache_store.events import ChunkKey, Tier
from cache_store.file_tier import FileTier
from cache_store.store_stats import StoreCounters
from cache_store.threads import Threads
from cache_store.tier_health import NoRoom, TierUnavailable

logger = logging.getLogger(__name__)

WRITES_AT_ONCE = 2
ROOM_TRIES = 3
HEAD_BYTES = 4096
"""More than the head of a part has."""


class Stock(Protocol):
    """What the writer needs of a `Shelf`."""

    tier: Tier
    entries: Entries

    def note(
        self, key: ChunkKey, rank: int, kind: Kind, nbytes: int, payload_bytes: int, cost_s: float
    ) -> None:
        """A part is there."""
        ...

    def forget(self, keys: Sequence[ChunkKey]) -> object:
        """Chunks are not there; their files are as they are."""
        ...

    def drop(self, keys: Sequence[ChunkKey]) -> object:
        """Chunks are not there; their files will be deleted."""
        ...

    async def evict(self, over: Callable[[], int]) -> None:
        """Delete what is worth least to free so many bytes, counted after what is already being deleted."""
        ...


class ShelfWriter:
    """Belongs to the store's loop. What goes wrong with a write is counted and leaves the chunk out."""

    def __init__(
        self,
        stock: Stock,
        files: FileTier,
        threads: Threads,
        *,
        admission: Admission,
        max_in_flight: int,
        counters: StoreCounters,
    ) -> None:
        self.in_flight = 0
        """Bytes of writes under way and waiting."""
        self.keys: set[ChunkKey] = set()
        """Of writes under way and waiting."""
        self.unwanted: set[ChunkKey] = set()
        """Of those: what is to be deleted as soon as that has ended."""
        self._stock = stock
        self._files = files
        self._threads = threads
        self._admission = admission
        self._max_in_flight = max_in_flight
        self._counters = counters
        self._turns = asyncio.Semaphore(WRITES_AT_ONCE)

    def admit(self, key: ChunkKey, nbytes: int, parts: int) -> bool:
        """Whether to write this chunk, which is not there and of which a faster tier has all parts: one touch.

        After True call `write`, which must get all parts.
        """
        if key in self.keys or not self._admission.admit(key):
            return False
        if not self._files.writable or self.in_flight + nbytes > self._max_in_flight:
            self._counters.writes_dropped[self._stock.tier] += parts
            return False
        self._stock.forget([key])
        self.keys.add(key)
        self.in_flight += nbytes
        return True

    async def write(self, key: ChunkKey, parts: Sequence[tuple[Header, memoryview]]) -> None:
        """Returns when nothing reads the payloads any more, however long the tier takes."""
        tier, written = self._stock.tier, 0
        try:
            async with self._turns:
                for header, payload in parts:
                    if key in self.unwanted or not await self._write_part(key, header, payload):
                        break
                    written += 1
        finally:
            self.in_flight -= sum(payload.nbytes for _, payload in parts)
            self._counters.writes[tier] += written
            self._counters.writes_dropped[tier] += len(parts) - written
            self.keys.remove(key)
            if key in self.unwanted or written < len(parts):
                self.unwanted.discard(key)
                self._stock.drop([key])

    async def _write_part(self, key: ChunkKey, header: Header, payload: memoryview) -> bool:
        try:
            nbytes = await self._write_with_room(header, payload)
        except (NoRoom, TierUnavailable, ChunkError) as error:
            logger.info("a chunk is not written to %s: %s", self._stock.tier, error)
            return False
        kind = Kind(header.identity, header.world_size, header.tenant)
        self._stock.note(key, header.rank, kind, nbytes, header.nbytes, header.cost_s)
        return True

    async def _write_with_room(self, header: Header, payload: memoryview) -> int:
        files, nbytes = self._files, header.nbytes + HEAD_BYTES
        for _ in range(ROOM_TRIES):
            if files.capacity and files.used + nbytes > files.capacity:
                await self._stock.evict(lambda: files.used + nbytes - files.capacity)
            try:
                return await self._threads.finish(None, files.write, header, payload)
            except NoRoom:
                # Another write took it, or this one replaces a file and needs room for both.
                continue
        raise NoRoom(f"{self._stock.tier} has no room for {nbytes} bytes")

    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself."""
        assert self.unwanted <= self.keys
        assert self.in_flight > 0 if self.keys else self.in_flight == 0
