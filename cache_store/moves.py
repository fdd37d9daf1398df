"""Bringing parts into a node's memory: from its disk, from other nodes, from the remote file system."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from cache_store.chunk import ChunkError, Header, verify
from cache_store.dram import Dram, Part
from cache_store.events import ChunkKey
from cache_store.flights import Flights
from cache_store.load_cost import BandwidthMeter
from cache_store.object_space import Held, ObjectGone, ObjectSpace
from cache_store.peers import Lent, PartName, Peers
from cache_store.prefetches import Prefetches
from cache_store.shelf import Shelf, ShelfMiss
from cache_store.store_stats import StoreCounters
from cache_store.threads import Threads
from cache_store.wire import ABSENT, PEER, TIER_NAMES, LoadOutcome

logger = logging.getLogger(__name__)

KEYS_PER_FETCH = 64
PULLS_AT_ONCE = 4

Outcome = LoadOutcome | Literal["no_room", "unwanted"]


class Arrival(NamedTuple):
    """How a flight ended. When it is `loaded` the part is in dram, or in `scratch` where there was no room."""

    outcome: Outcome
    tier: int = ABSENT
    header: Header | None = None
    scratch: memoryview | None = None


class Moves:
    """Single flights of parts into dram, by key and rank. Belongs to the store's loop.

    Every one ends within the limits of the tiers that it asks, one after the other: disk, peer, remote; one that is
    ahead of its load waits for its turn before, as long as somebody wants it. None raises.
    """

    def __init__(
        self,
        *,
        dram: Dram,
        shelves: Sequence[Shelf],
        peers: Peers,
        space: ObjectSpace,
        threads: Threads,
        prefetches: Prefetches,
        meter: BandwidthMeter,
        counters: StoreCounters,
        pull_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`shelves` in the order in which they are asked, the fastest first."""
        self.flights: Flights[PartName, Arrival] = Flights()
        self._dram = dram
        self._shelves = shelves
        self._peers = peers
        self._space = space
        self._threads = threads
        self._prefetches = prefetches
        self._meter = meter
        self._counters = counters
        self._pull_timeout_s = pull_timeout_s
        self._clock = clock
        self._pulls = asyncio.Semaphore(PULLS_AT_ONCE)

    def ahead(self, key: ChunkKey, world_size: int) -> None:
        """Move what is missing of a chunk to dram, as long as somebody leases it and there is room."""
        for rank in range(world_size):
            if self._dram.part(key, rank) is None and (key, rank) not in self.flights:
                self.flights.start((key, rank), self._bring(key, rank, now=False))

    def from_peer(self, node: str, keys: Sequence[ChunkKey], world_size: int) -> None:
        """Move chunks from the dram of another node, as `ahead` does."""
        for start in range(0, len(keys), KEYS_PER_FETCH):
            some = [
                (key, rank)
                for key in keys[start : start + KEYS_PER_FETCH]
                for rank in range(world_size)
                if self._dram.part(key, rank) is None and (key, rank) not in self.flights
            ]
            if some:
                fetched = asyncio.get_running_loop().create_task(self._fetch(node, some))
                for key, rank in some:
                    self.flights.start((key, rank), self._bring(key, rank, now=False, fetched=fetched))

    def at_once(self, key: ChunkKey, rank: int) -> asyncio.Task[Arrival] | None:
        """A flight that a load waits for: it does without room in dram. None when no tier of this node has it."""
        if not any(shelf.holds_part(key, rank) for shelf in self._shelves):
            return None
        return self.flights.start((key, rank), self._bring(key, rank, now=True))

    async def _bring(
        self,
        key: ChunkKey,
        rank: int,
        now: bool,
        fetched: asyncio.Task[Mapping[PartName, Lent]] | None = None,
    ) -> Arrival:
        arrival = Arrival("missing")
        for source in self._sources(key, rank, now, fetched):
            arrival = await source
            if arrival.outcome in ("loaded", "no_room", "unwanted"):
                break
        if arrival.outcome == "loaded":
            self._counters.moved[TIER_NAMES[arrival.tier]] += 1
        elif arrival.outcome != "unwanted":
            self._counters.moves_failed[arrival.outcome] += 1
        return arrival

    def _sources(
        self, key: ChunkKey, rank: int, now: bool, fetched: asyncio.Task[Mapping[PartName, Lent]] | None
    ) -> Iterator[Coroutine[Any, Any, Arrival]]:
        for shelf in self._shelves:
            if fetched is not None and shelf.code > PEER:
                yield self._from_peer(key, rank, fetched)
                fetched = None
            if shelf.holds_part(key, rank):
                yield self._from_shelf(shelf, key, rank, now)
        if fetched is not None:
            yield self._from_peer(key, rank, fetched)

    def _wanted(self, key: ChunkKey, rank: int, nbytes: int) -> bool:
        """Whether somebody still waits for the chunk, which has so many bytes."""
        wanted = self._prefetches.wanted(key, nbytes)
        if not wanted and rank == 0 and key in self._prefetches:
            self._counters.prefetches_refused += 1
        return wanted

    # Disk and remote

    async def _from_shelf(self, shelf: Shelf, key: ChunkKey, rank: int, now: bool) -> Arrival:
        async with shelf.reads:
            entry = shelf.entries.get(key)
            if entry is None or not shelf.holds_part(key, rank):
                return Arrival("missing")
            if not now and not self._wanted(key, rank, entry.nbytes):
                return Arrival("unwanted")
            nbytes, tenant = entry.part_bytes, entry.kind.tenant
            room = self._dram.reserve(key, nbytes, tenant) is None
            if not room and not now:
                return Arrival("no_room")
            began = self._clock()
            try:
                header, payload = await shelf.read(key, rank, entry)
            except ShelfMiss as miss:
                if room:
                    self._dram.cancel(nbytes, tenant)
                return Arrival(miss.outcome)
            if room and (key not in shelf.entries or (header.nbytes, header.tenant) != (nbytes, tenant)):
                # Dropped meanwhile, or only its path was known.
                self._dram.cancel(nbytes, tenant)
                room = key in shelf.entries and self._dram.reserve(key, header.nbytes, header.tenant) is None
            if room:
                await self._put(shelf.code, header, payload)
            self._meter.record(shelf.code, header.nbytes, self._clock() - began)
            return Arrival("loaded", shelf.code, header, payload)

    async def _put(self, tier: int, header: Header, payload: memoryview) -> Part | None:
        """Into dram, where there is room reserved. None when that went wrong; the caller has the bytes anyway."""
        try:
            held = await self._threads.finish(None, self._space.put, payload)
        except MemoryError as error:
            self._dram.cancel(header.nbytes, header.tenant)
            logger.warning("a chunk from %s does not stay in memory: %s", TIER_NAMES[tier], error)
            return None
        return self._take_in(tier, header, held)

    def _take_in(self, tier: int, header: Header, held: Held) -> Part | None:
        if not self._dram.fits(header):
            held.free()
            self._dram.cancel(header.nbytes, header.tenant)
            return None
        return self._dram.place(header, held, tier)

    # Peers

    async def _fetch(self, node: str, names: Sequence[PartName]) -> Mapping[PartName, Lent]:
        keys = list(dict.fromkeys(key for key, _ in names))
        try:
            async with asyncio.timeout(self._pull_timeout_s):
                return await self._peers.fetch(node, keys, self._pull_timeout_s)
        except Exception as error:
            # Whatever another node's actor or the way to it does, it is a miss here.
            self._counters.peer_failures += 1
            reason = str(error).partition("\n")[0] or type(error).__name__
            logger.info("node %s gave no chunks: %s", node, reason)
            return {}

    async def _from_peer(
        self, key: ChunkKey, rank: int, fetched: asyncio.Task[Mapping[PartName, Lent]]
    ) -> Arrival:
        began = self._clock()
        lent = (await asyncio.shield(fetched)).get((key, rank))
        if lent is None:
            return Arrival("missing")
        async with self._pulls:
            if not self._wanted(key, rank, lent.header.nbytes * lent.header.world_size):
                return Arrival("unwanted")
            return await self._pull(key, rank, lent, began)

    async def _pull(self, key: ChunkKey, rank: int, lent: Lent, began: float) -> Arrival:
        header = lent.header
        if header.rank != rank or header.key != key or header.nbytes <= 0 or not self._dram.fits(header):
            return self._corrupt_peer(
                f"a part of rank {header.rank} of {header.world_size}, asked for rank {rank}"
            )
        if self._dram.reserve(key, header.nbytes, header.tenant) is not None:
            return Arrival("no_room")
        if not self._dram.reserve_copy(key, header.nbytes):
            self._dram.cancel(header.nbytes, header.tenant)
            return Arrival("no_room")
        held = None
        try:
            held = await self._threads.finish(None, _pulled, self._space, lent, self._pull_timeout_s)
        except TimeoutError:
            return Arrival("late")
        except ChunkError as error:
            return self._corrupt_peer(str(error))
        except (ObjectGone, MemoryError) as error:
            self._counters.peer_failures += 1
            logger.info("a chunk of another node did not come: %s", error)
            return Arrival("missing")
        finally:
            self._dram.cancel_copy(header.nbytes)
            if held is None:
                self._dram.cancel(header.nbytes, header.tenant)
        if self._take_in(PEER, header, held) is None:
            return Arrival("missing")
        self._meter.record(PEER, header.nbytes, self._clock() - began)
        return Arrival("loaded", PEER, header)

    def _corrupt_peer(self, why: str) -> Arrival:
        self._counters.corrupt[TIER_NAMES[PEER]] += 1
        logger.warning("another node's chunk is not what was asked for: %s", why)
        return Arrival("corrupt")


def _pulled(space: ObjectSpace, lent: Lent, timeout_s: float) -> Held:
    """An own copy of another node's part, verified. Raises what `ObjectSpace.pull`, `put` and `verify` raise."""
    header = lent.header
    copy = space.pull(lent.ref, timeout_s)
    try:
        verify(
            header,
            copy.view,
            key=ChunkKey(header.key),
            identity=header.identity,
            rank=header.rank,
            world_size=header.world_size,
        )
        return space.put(copy.view)
    finally:
        copy.free()
