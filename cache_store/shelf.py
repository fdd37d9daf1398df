"""The files of one tier as the store of a node sees them: what is there, what is read, written and deleted now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

import numpy as np

from cache_store.admission import Admission
from cache_store.chunk import ChunkError, Header
from cache_store.chunk_path import Stored
from cache_store.entries import Entries, Entry, Kind
from cache_store.events import ChunkKey, Tier
from cache_store.eviction import Eviction
from cache_store.file_tier import FileTier
from cache_store.leases import Leases
from cache_store.shelf_writer import WRITES_AT_ONCE, ShelfWriter
from cache_store.stocktaking import Stocktaking
from cache_store.store_stats import StoreCounters
from cache_store.stream import Publisher
from cache_store.threads import Threads
from cache_store.tier_health import PartMissing, TierUnavailable
from cache_store.wire import TIER_NAMES

logger = logging.getLogger(__name__)

READ_THREADS = 4
WRITE_THREADS = WRITES_AT_ONCE + 1


class ShelfMiss(Exception):
    """A part that was known can't be had."""

    def __init__(self, outcome: Literal["missing", "corrupt", "late"]) -> None:
        super().__init__(outcome)
        self.outcome: Literal["missing", "corrupt", "late"] = outcome


class Fetched(NamedTuple):
    header: Header
    payload: memoryview


class Shelf:
    """Belongs to the store's loop; files are touched in threads of its own, so that a slow tier slows nothing else.

    A chunk is there from when its last part is written until it is dropped; deleting its files comes later. In
    between nothing of that key is written. What goes wrong with a write is counted and leaves the chunk out.
    """

    def __init__(
        self,
        tier: Tier,
        files: FileTier,
        *,
        eviction: Eviction | None,
        admission: Admission,
        timeout_s: float,
        max_writing: int,
        leases: Leases,
        publisher: Publisher,
        counters: StoreCounters,
        clock: Callable[[], float],
        rescan_s: float | None = None,
    ) -> None:
        """`eviction` is None for a tier without a limit. `max_writing` bounds the bytes of writes in flight. With
        `rescan_s`, what others wrote becomes known that often."""
        self.tier: Tier = tier
        self.code = TIER_NAMES.index(tier)
        self.entries = Entries()
        self.count = 0
        """Complete chunks."""
        self.reads = asyncio.Semaphore(READ_THREADS)
        """Take it around `read`, so that reads begin in the order in which they were wanted."""
        self._files = files
        self._eviction = eviction
        self._timeout_s = timeout_s
        self._leases = leases
        self._publisher = publisher
        self._counters = counters
        self._clock = clock
        self._readers = Threads(f"{tier}-read", READ_THREADS)
        self._writers = Threads(f"{tier}-write", WRITE_THREADS)
        self._deleted: set[ChunkKey] = set()
        """Keys whose files are being deleted."""
        self._again: set[ChunkKey] = set()
        """Keys that were asked to be written while they were leaving."""
        self.on_left: Callable[[ChunkKey], None] = lambda key: None
        """Told of a key that `admit` refused because it was leaving, once it has left."""
        self._deletions: set[asyncio.Task[None]] = set()
        self._writer = ShelfWriter(
            self, files, self._writers, admission=admission, max_in_flight=max_writing, counters=counters
        )
        self._stocktaking = Stocktaking(self, files, self._writers, clock, rescan_s)

    # What is there

    @property
    def readable(self) -> bool:
        return self._files.readable

    @property
    def working(self) -> bool:
        return self._files.readable and self._files.writable

    @property
    def capacity(self) -> int:
        return self._files.capacity

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether a part of the chunk is there, or will be."""
        return key in self.entries or key in self._writer.keys

    def has(self, key: ChunkKey) -> bool:
        """Whether the whole chunk is there and can be read."""
        entry = self.entries.get(key)
        return entry is not None and entry.complete and self.readable

    def holds_part(self, key: ChunkKey, rank: int) -> bool:
        entry = self.entries.get(key)
        return entry is not None and rank >= 0 and bool(entry.ranks >> rank & 1) and self.readable

    def touch(self, key: ChunkKey) -> None:
        """The chunk was used, here or in a faster tier."""
        if self.entries.touch(key, self._clock()) and self._eviction is not None and key in self._eviction:
            self._eviction.touch(key)

    # Reading

    async def read(self, key: ChunkKey, rank: int, entry: Entry) -> Fetched:
        """A part in memory of its own, verified. Raises ShelfMiss."""
        try:
            return await self._readers.attempt(
                self._timeout_s,
                _read,
                self._files,
                key,
                entry.kind.identity,
                rank,
                entry.kind.world_size,
                entry.part_bytes,
            )
        except TimeoutError:
            raise ShelfMiss("late") from None
        except TierUnavailable:
            raise ShelfMiss("missing") from None
        except (PartMissing, ValueError) as error:
            corrupt = isinstance(error, ChunkError)
            if corrupt:
                self._counters.corrupt[self.tier] += 1
                logger.warning("%s: a chunk is dropped: %s", self.tier, error)
            self.drop([key])
            raise ShelfMiss("corrupt" if corrupt else "missing") from None

    # Writing

    def admit(self, key: ChunkKey, nbytes: int, parts: int) -> bool:
        """Whether to write this chunk now, of which a faster tier has all parts. That counts as one touch.

        After True call `write`, which must get all parts. A chunk that is leaving is refused, and no touch; see
        `on_left`.
        """
        if self._is_leaving(key):
            self._again.add(key)
            return False
        if any(self.entries.sizes_if_complete([key], parts)):
            return False
        return self._writer.admit(key, nbytes, parts)

    def _is_leaving(self, key: ChunkKey) -> bool:
        return key in self._deleted or key in self._writer.unwanted

    async def write(self, key: ChunkKey, parts: Sequence[tuple[Header, memoryview]]) -> None:
        """Returns when nothing reads the payloads any more, however long the tier takes."""
        await self._writer.write(key, parts)

    def note(
        self, key: ChunkKey, rank: int, kind: Kind, nbytes: int, payload_bytes: int, cost_s: float
    ) -> None:
        """A part is there."""
        if self._add(key, rank, kind, nbytes, payload_bytes, cost_s):
            self._publisher.apply(self.tier, added=[key])

    def _add(
        self, key: ChunkKey, rank: int, kind: Kind, nbytes: int, payload_bytes: int, cost_s: float
    ) -> bool:
        """Whether the part completes its chunk."""
        complete = self.entries.add(key, rank, kind, nbytes, payload_bytes, cost_s, self._clock())
        self.count += complete
        if complete and self._eviction is not None:
            entry = self.entries.get(key)
            assert entry is not None
            self._eviction.add(key, entry.nbytes, entry.cost_s)
        return complete

    # Dropping

    def drop(self, keys: Iterable[ChunkKey]) -> asyncio.Task[None] | None:
        """Chunks are not there from now on; their files are deleted by the task returned, if there are any. Those
        being written go when that has ended."""
        keys = list(keys)
        self._writer.unwanted.update(self._writer.keys.intersection(keys))
        doomed = self.forget(keys)
        if not doomed:
            self._tell_left(keys)
            return None
        self._deleted.update(key for key, _ in doomed)
        deletion = asyncio.get_running_loop().create_task(self._delete(doomed))
        self._deletions.add(deletion)
        deletion.add_done_callback(self._deletions.discard)
        return deletion

    def forget(self, keys: Iterable[ChunkKey]) -> list[tuple[ChunkKey, Entry]]:
        """Chunks are not there; their files are as they are."""
        gone = [(key, entry) for key in keys if (entry := self.entries.remove(key)) is not None]
        complete = [key for key, entry in gone if entry.complete]
        self.count -= len(complete)
        if self._eviction is not None:
            for key in complete:
                self._eviction.remove(key)
        self._publisher.apply(self.tier, removed=complete)
        return gone

    async def _delete(self, doomed: list[tuple[ChunkKey, Entry]]) -> None:
        try:
            await self._writers.finish(None, _delete, self._files, doomed)
        finally:
            keys = [key for key, _ in doomed]
            self._deleted.difference_update(keys)
            self._tell_left(keys)

    def _tell_left(self, keys: Iterable[ChunkKey]) -> None:
        for key in self._again.intersection(keys):
            if not self._is_leaving(key):
                self._again.remove(key)
                self.on_left(key)

    async def evict(self, over: Callable[[], int]) -> None:
        """Delete what is worth least to free so many bytes, counted after what is already being deleted."""
        while self._deletions:
            await asyncio.wait(self._deletions)
        nbytes = over()
        if nbytes > 0 and self._eviction is not None:
            victims = self._eviction.victims(nbytes, self._leases.held)
            self._counters.evicted[self.tier] += len(victims)
            deletion = self.drop(victims)
            if deletion is not None:
                await asyncio.wait([deletion])

    def expire(self, moment: float) -> int:
        """Drop what was not used since then and nobody holds; how many chunks those were."""
        unused = self.entries.unused_since(moment)
        old = [key for key in unused if not self._leases.held(key)]
        for key in unused:
            self.entries.touch(key, self._clock())
        self.drop(old)
        return len(old)

    # Life

    async def start(self) -> None:
        """List what is there. Returns when that is done, or after the tier's time limit; it then goes on."""
        await self._stocktaking.start(self._timeout_s)

    def tend(self) -> None:
        """List what is there when it is time to, and see whether what did not work works again. Call it often."""
        self._stocktaking.tend()

    def take_in(self, found: Iterable[Stored]) -> None:
        """Parts that were listed."""
        complete = []
        for part in found:
            if part.key in self._writer.keys or part.key in self._deleted:
                continue
            kind = Kind(part.identity, part.world_size, part.tenant)
            try:
                if self._add(part.key, part.rank, kind, part.file_bytes, part.nbytes, part.cost_s):
                    complete.append(part.key)
            except ValueError as error:
                logger.info("%s: a file is left alone: %s", self.tier, error)
        self._publisher.apply(self.tier, added=complete)

    @property
    def busy(self) -> bool:
        return bool(self._writer.keys or self._deletions or self._stocktaking.under_way)

    async def settle(self) -> None:
        """Wait until nothing is listed or deleted."""
        await self._stocktaking.settle()
        while self._deletions:
            await asyncio.wait(self._deletions)

    async def close(self, limit_s: float) -> None:
        """After the last write has ended or was given up."""
        await self._stocktaking.close(limit_s)
        if self._deletions:
            await asyncio.wait(self._deletions, timeout=limit_s)
        with suppress(TimeoutError):
            await self._readers.attempt(limit_s, self._files.close)
        self._readers.close()
        self._writers.close()

    def check_integrity(self) -> None:
        """Raises AssertionError when the structures contradict each other."""
        self.entries.check_integrity()
        complete = {key for key in self.entries if self.entries.is_complete(key)}
        assert self._publisher.keys(self.tier) == complete
        assert self.count == len(complete)
        self._writer.check_integrity()
        assert all(map(self._is_leaving, self._again))
        if self._eviction is not None:
            self._eviction.check_integrity()
            assert len(self._eviction) == len(complete)
            assert all(key in self._eviction for key in complete)


def _read(
    files: FileTier, key: ChunkKey, identity: bytes, rank: int, world_size: int, nbytes: int
) -> Fetched:
    buffer = memoryview(np.empty(nbytes, np.uint8).data)
    header = files.read_into(key, identity, rank, buffer, world_size=world_size)
    return Fetched(header, buffer[: header.nbytes])


def _delete(files: FileTier, doomed: Iterable[tuple[ChunkKey, Entry]]) -> None:
    for key, entry in doomed:
        for rank in range(entry.ranks.bit_length()):
            if entry.ranks >> rank & 1:
                with suppress(TierUnavailable):
                    files.delete(key, entry.kind.identity, rank)
