"""Giving parts to engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cache_store.chunk import Header
from cache_store.dram import Dram, Part
from cache_store.events import ChunkKey
from cache_store.flights import arrival
from cache_store.load_cost import BandwidthMeter
from cache_store.moves import Arrival, Moves
from cache_store.store_stats import StoreCounters
from cache_store.threads import Threads
from cache_store.wire import ABSENT, DRAM, TIER_NAMES, LoadOutcome

LONGEST_LOAD_S = 600.0
SHORT_BYTES = 8 * 1024 * 1024
"""Copying so much takes no longer than handing it to a thread and hearing of its end."""


class LoadResult(NamedTuple):
    outcome: LoadOutcome
    tier: int
    """Where the bytes came from, a code of `cache_store.wire`. A part that was moved to dram for this load or
    ahead of it counts once as coming from where it was; ABSENT when it was not loaded."""
    header: Header | None
    """None unless loaded."""


class Loads:
    """Belongs to the store's loop."""

    def __init__(
        self,
        dram: Dram,
        moves: Moves,
        threads: Threads,
        meter: BandwidthMeter,
        counters: StoreCounters,
        clock: Callable[[], float],
    ) -> None:
        self._dram = dram
        self._moves = moves
        self._threads = threads
        self._meter = meter
        self._counters = counters
        self._clock = clock

    async def load_into(self, key: ChunkKey, rank: int, target: memoryview, limit_s: float) -> LoadResult:
        """See `NodeStore.load_into`."""
        deadline = self._clock() + (min(limit_s, LONGEST_LOAD_S) if limit_s > 0 else 0.0)
        try:
            result = await self._load(key, rank, target, deadline)
        except TimeoutError:
            result = LoadResult("late", ABSENT, None)
        self._counters.loads[result.outcome] += 1
        if result.header is not None:
            self._counters.loaded_bytes[TIER_NAMES[result.tier]] += result.header.nbytes
        return result

    async def _load(self, key: ChunkKey, rank: int, target: memoryview, deadline: float) -> LoadResult:
        waited = None
        if self._dram.part(key, rank) is None:
            waited = await self._arrival(key, rank, deadline)
        part = self._dram.part(key, rank)
        if part is not None:
            return await self._copy_part(part, target, deadline, waited)
        if waited is None or waited.header is None or waited.scratch is None:
            outcome = waited.outcome if waited is not None else "missing"
            return LoadResult(outcome if outcome in ("late", "corrupt") else "missing", ABSENT, None)
        return await self._copy(waited.header, waited.scratch, waited.tier, target, deadline)

    async def _arrival(self, key: ChunkKey, rank: int, deadline: float) -> Arrival | None:
        """Of a flight that is under way, or else of one that this load begins. Raises TimeoutError."""
        under_way = self._moves.flights.get((key, rank))
        if under_way is not None:
            arrived = await arrival(under_way, deadline - self._clock())
            if arrived.outcome not in ("no_room", "unwanted"):
                return arrived
            under_way = self._moves.flights.get((key, rank))
        flight = under_way or self._moves.at_once(key, rank)
        return None if flight is None else await arrival(flight, deadline - self._clock())

    async def _copy_part(
        self, part: Part, target: memoryview, deadline: float, waited: Arrival | None
    ) -> LoadResult:
        tier = waited.tier if waited is not None and waited.outcome == "loaded" else part.origin
        part.origin = DRAM
        self._dram.borrow(part)
        try:
            return await self._copy(part.header, part.held.view, tier, target, deadline)
        finally:
            self._dram.give_back(part)

    async def _copy(
        self, header: Header, payload: memoryview, tier: int, target: memoryview, deadline: float
    ) -> LoadResult:
        if target.nbytes < header.nbytes:
            return LoadResult("missing", ABSENT, None)
        began = self._clock()
        run = self._threads.finish_short if header.nbytes <= SHORT_BYTES else self._threads.finish
        await run(max(deadline - began, 0.0), _copy, target, payload[: header.nbytes])
        if tier == DRAM:
            self._meter.record(DRAM, header.nbytes, self._clock() - began)
        return LoadResult("loaded", tier, header)


def _copy(target: memoryview, payload: memoryview) -> None:
    # numpy copies without the GIL.
    np.copyto(np.frombuffer(target, np.uint8)[: len(payload)], np.frombuffer(payload, np.uint8))
