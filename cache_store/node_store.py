"""All of a node's cache actor but Ray: the chunks that the node has, in memory, on disk and remote."""

from __future__ import annotations

import asyncio
import copy
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from cache_store.chunk import Header
from cache_store.config import CacheConfig
from cache_store.dram import Dram
from cache_store.events import ChunkKey, Tier
from cache_store.eviction import eviction_from
from cache_store.file_tier import FileTier
from cache_store.leases import Leases
from cache_store.load_cost import BandwidthMeter
from cache_store.loads import LoadResult, Loads
from cache_store.lookups import MOST_AHEAD, Lookups
from cache_store.moves import Moves
from cache_store.object_space import ObjectSpace
from cache_store.peers import Lent, NoPeers, PartName, Peers
from cache_store.prefetches import Prefetches
from cache_store.quota import Quotas
from cache_store.saves import Saves
from cache_store.shelf import Shelf
from cache_store.shelves import shelves
from cache_store.store_report import chunk_infos, tier_stats
from cache_store.store_stats import ChunkInfo, StoreCounters, StoreStats
from cache_store.stream import Publisher
from cache_store.threads import Threads
from cache_store.wire import ABSENT, DRAM, TIER_NAMES, Found, Lookup, SaveOutcome, Source
from cache_store.write_behind import WriteBehind

logger = logging.getLogger(__name__)

__all__ = ["LoadResult", "NodeStore"]

COPY_THREADS = 4
PREFETCH_SHARE = 0.25
"""Of the memory's budget, for chunks of requests that have not come yet."""
QUEUEING_S = 5.0
"""A request for which chunks were fetched comes so soon after them, or does without their lease."""
EXPIRE_EVERY_S = 1.0
CLOSE_LIMIT_S = 10.0


class NodeStore:
    """Belongs to one asyncio loop: make it and call everything there. Only bytes are moved in threads.

    A chunk counts as found or present only when the part of every rank is there. Nothing here raises for what a
    tier, a peer or an engine did wrong: a slow or failing tier is a miss, and all of it is counted.

    Call order: `start` once, then anything, then `close` once.
    """

    def __init__(
        self,
        *,
        node: str,
        config: CacheConfig,
        dram_bytes: int,
        space: ObjectSpace,
        publisher: Publisher,
        disk: FileTier | None = None,
        remote: FileTier | None = None,
        peers: Peers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`dram_bytes` is the budget (`config.dram.mib`, or the node's share that stands for 0). `publisher` must
        speak of `dram`, and of `disk` and `remote` where these are given. `node` is this node's id."""
        self.counters = StoreCounters()
        self._node = node
        self._ttl_s = config.ttl_s
        self._clock = clock
        self._threads = Threads("copy", COPY_THREADS)
        self._leases = Leases(clock)
        self._prefetches = Prefetches(
            self._leases, int(dram_bytes * PREFETCH_SHARE), config.dram.pull_timeout_s + QUEUEING_S, clock
        )
        self._meter = BandwidthMeter(clock)
        self._quotas = _quotas(config)
        self._dram = Dram(
            budget=dram_bytes,
            space=space,
            eviction=lambda: eviction_from(config.dram.eviction),
            quotas=self._quotas,
            leases=self._leases,
            publisher=publisher,
            clock=clock,
            on_evicted=lambda chunks: _count(self.counters.evicted, DRAM, chunks),
        )
        self._shelves = list(shelves(config, disk, remote, self._leases, publisher, self.counters, clock))
        self._moves = Moves(
            dram=self._dram,
            shelves=self._shelves,
            peers=peers or NoPeers(),
            space=space,
            threads=self._threads,
            prefetches=self._prefetches,
            meter=self._meter,
            counters=self.counters,
            pull_timeout_s=config.dram.pull_timeout_s,
            clock=clock,
        )
        self._write_behind = WriteBehind(self._dram, self._shelves)
        self._saves = Saves(
            dram=self._dram,
            space=space,
            threads=self._threads,
            flights=self._moves.flights,
            write_behind=self._write_behind,
            counters=self.counters,
            max_in_flight=config.save_mib_in_flight << 20,
        )
        self._lookups = Lookups(node, self._dram, self._shelves, self._moves, self._write_behind)
        self._loads = Loads(self._dram, self._moves, self._threads, self._meter, self.counters, clock)
        self._housekeeping: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> None:
        """Take in what is on disk and remote, and begin to expire. Waits for the listings, but no longer than
        their tiers' time limits: what is listed later becomes known then."""
        await asyncio.gather(*(shelf.start() for shelf in self._shelves))
        self._housekeeping = asyncio.get_running_loop().create_task(self._keep_house())

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            try:
                self.expire()
            except Exception:
                logger.exception("the store can't keep house")

    async def close(self) -> None:
        """End all moves and free all memory. Writes under way end first, within a limit."""
        if self._housekeeping is not None:
            self._housekeeping.cancel()
        await self._moves.flights.close(CLOSE_LIMIT_S)
        await self._write_behind.close(CLOSE_LIMIT_S)
        for shelf in self._shelves:
            await shelf.close(CLOSE_LIMIT_S)
        self._threads.close()
        self._dram.drop(list(self._dram.chunks))

    async def settle(self) -> None:
        """Wait until nothing is under way: moves, saves, writes, listings and deletions."""
        self._lookups.catch_up()
        while self._moves.flights or self._write_behind or any(shelf.busy for shelf in self._shelves):
            await self._moves.flights.settle()
            await self._write_behind.settle()
            for shelf in self._shelves:
                await shelf.settle()

    # For engines

    def lookup(self, lookup: Lookup) -> Found:
        """Answer at once from what is known here; lease the leading run and begin its moves to dram."""
        run = self._lookups.find(lookup.keys, lookup.world_size, lookup.sources)
        self.counters.lookups += 1
        for code, name in enumerate(TIER_NAMES):
            self.counters.found[name] += run.tiers.count(code)
        lease = self._leases.take(run.keys, lookup.lease_s)
        self._prefetches.come(run.asked)
        self._lookups.use(run)
        return Found(lookup.id, run.tiers, run.nbytes, lease, self._meter.seconds_per_byte())

    async def load_into(self, key: ChunkKey, rank: int, target: memoryview, limit_s: float) -> LoadResult:
        """Copy a part's payload to the start of `target` (writable, format B, contiguous).

        Nothing writes to `target` after this has returned or raised. When the caller is cancelled, a copy that is
        under way ends first. A `target` shorter than the payload is `missing`.
        """
        self._lookups.catch_up()
        return await self._loads.load_into(key, rank, target, limit_s)

    async def save(self, header: Header, payload: memoryview) -> SaveOutcome:
        """Keep a copy of `payload`, which may change once this has returned or raised."""
        self._lookups.catch_up()
        return await self._saves.save(header, payload)

    def release(self, lease: int) -> None:
        """An unknown or expired lease is none."""
        self._leases.release(lease)

    def corrupt(self, key: ChunkKey, tier: int) -> None:
        """An engine found that what it loaded from `tier` is not what its header says: drop it there and here."""
        _count(self.counters.corrupt, tier if tier in range(len(TIER_NAMES)) else ABSENT, 1)
        self._drop([key], [shelf for shelf in self._shelves if shelf.code == tier])

    # For routers and other nodes

    def prefetch(self, keys: Sequence[ChunkKey], world_size: int, sources: Sequence[Source] = ()) -> int:
        """Begin to move the leading run to dram; how many chunks are there or on their way. They stay until an
        engine asks for them or `QUEUEING_S` after they can have come, and are a part of the budget at most."""
        run = self._lookups.find(b"".join(keys), world_size, sources)
        count = self._prefetches.begin(run.keys[:MOST_AHEAD], run.nbytes)
        self._lookups.use(run._replace(keys=run.keys[:count]))
        self.counters.prefetched += count
        self.counters.prefetches_refused += len(run.keys) - count
        return count

    def lend(self, keys: Sequence[ChunkKey], limit_s: float) -> Mapping[PartName, Lent]:
        """For another node's `Peers.fetch`: all parts of the complete chunks that are in dram, held for `limit_s`."""
        chunks = [
            chunk for key in keys if (chunk := self._dram.chunks.get(key)) is not None and chunk.complete
        ]
        self._leases.take([chunk.key for chunk in chunks], limit_s)
        for chunk in chunks:
            self._dram.touch(chunk)
        parts = {
            (chunk.key, rank): Lent(part.header, part.held.ref)
            for chunk in chunks
            for rank, part in enumerate(chunk.parts)
            if part is not None
        }
        self.counters.lent += len(parts)
        return parts

    # For operators

    def tiers_of(self, keys: Sequence[ChunkKey]) -> list[tuple[Tier, ...]]:
        """Where each chunk is on this node, complete. For people: nothing is leased, moved or touched."""
        return [self._tiers(key) for key in keys]

    def _tiers(self, key: ChunkKey) -> tuple[Tier, ...]:
        chunk = self._dram.chunks.get(key)
        in_dram: tuple[Tier, ...] = ("dram",) if chunk is not None and chunk.complete else ()
        return in_dram + tuple(shelf.tier for shelf in self._shelves if shelf.has(key))

    def pin(self, keys: Iterable[ChunkKey]) -> int:
        """Never evict or expire these, until `unpin`. How many of them are known and now pinned. Pinning twice is
        pinning once; a pin ends with its chunk."""
        known = [key for key in dict.fromkeys(keys) if self._tiers(key)]
        for key in known:
            self._leases.pin(key)
        return len(known)

    def unpin(self, keys: Iterable[ChunkKey]) -> int:
        """How many of them were pinned."""
        return sum(self._leases.unpin(key) for key in keys)

    def evict(
        self, keys: Iterable[ChunkKey] | None, tiers: Sequence[Tier] = ("dram", "disk", "remote")
    ) -> int:
        """Drop these chunks, or all, from the tiers; pinned ones stay. How many left at least one tier."""
        if keys is None:
            keys = itertools.chain(self._dram.chunks, *(shelf.entries for shelf in self._shelves))
        unpinned = [key for key in dict.fromkeys(keys) if not self._leases.is_pinned(key)]
        return self._drop(
            unpinned, [shelf for shelf in self._shelves if shelf.tier in tiers], "dram" in tiers
        )

    def _drop(self, keys: Sequence[ChunkKey], shelves: Sequence[Shelf], dram: bool = True) -> int:
        """Of how many chunks a part was in one of these."""
        dropped = set[ChunkKey]()
        if dram:
            there = [key for key in keys if key in self._dram.chunks]
            dropped.update(there)
            self._dram.drop(there)
        for shelf in shelves:
            there = [key for key in keys if key in shelf]
            dropped.update(there)
            shelf.drop(there)
        for key in dropped:
            if self._leases.is_pinned(key) and not self._tiers(key):
                self._leases.unpin(key)
        return len(dropped)

    def expire(self) -> None:
        """End leases that have run out, and drop what `ttl_s` says. `start` has this called every second."""
        self._lookups.catch_up()
        self._prefetches.expire()
        self._leases.expire()
        for shelf in self._shelves:
            shelf.tend()
        if self._ttl_s is None:
            return
        moment = self._clock() - self._ttl_s
        old = [
            key
            for key, chunk in self._dram.chunks.items()
            if chunk.used < moment and not self._dram.must_stay(key)
        ]
        self._dram.drop(old)
        # Another node may use what is remote.
        self.counters.expired += len(old) + sum(
            shelf.expire(moment) for shelf in self._shelves if shelf.tier == "disk"
        )

    def stats(self) -> StoreStats:
        return StoreStats(
            node=self._node,
            tiers=tier_stats(self._dram, self._shelves),
            dram_in_use=self._dram.in_use,
            dram_leaving=self._dram.leaving,
            saving=self._saves.in_flight,
            leases=len(self._leases),
            leased=self._leases.leased,
            pinned=self._leases.pins,
            flights=len(self._moves.flights),
            tenants=self._quotas.usage(),
            seconds_per_byte=self._meter.seconds_per_byte(),
            counters=copy.deepcopy(self.counters),
        )

    def ls(self, limit: int) -> list[ChunkInfo]:
        """Some chunks, those in dram first."""
        return list(chunk_infos(limit, self._clock(), self._dram, self._shelves, self._leases))

    def check_integrity(self) -> None:
        """Raises AssertionError when the structures contradict themselves or each other."""
        self._leases.check_integrity()
        self._prefetches.check_integrity()
        self._dram.check_integrity()
        for shelf in self._shelves:
            shelf.check_integrity()

    def check_rest(self) -> None:
        """Also that nothing is left of what has ended: call it after `settle`, with no load or save open."""
        self.check_integrity()
        self._dram.check_rest()
        assert not len(self._moves.flights) + len(self._write_behind) + self._saves.in_flight


def _quotas(config: CacheConfig) -> Quotas:
    default = config.default_quota_mib
    limits = {tenant: mib << 20 for tenant, mib in config.quota_mib.items()}
    return Quotas(limits, None if default is None else default << 20)


def _count(totals: dict[str, int], tier: int, n: int) -> None:
    totals[TIER_NAMES[tier]] += n
