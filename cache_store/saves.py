"""Taking parts from engines."""

from __future__ import annotations

import logging

from cache_store.chunk import Header
from cache_store.dram import Dram
from cache_store.entries import MAX_WORLD_SIZE
from cache_store.events import KEY_BYTES, ChunkKey
from cache_store.flights import Flights, settled
from cache_store.moves import Arrival
from cache_store.object_space import ObjectSpace
from cache_store.peers import PartName
from cache_store.store_stats import StoreCounters
from cache_store.threads import Threads
from cache_store.wire import DRAM, SaveOutcome
from cache_store.write_behind import WriteBehind

logger = logging.getLogger(__name__)


class Saves:
    """Belongs to the store's loop. A save is a flight like a move: a part comes to memory in one way at a time."""

    def __init__(
        self,
        *,
        dram: Dram,
        space: ObjectSpace,
        threads: Threads,
        flights: Flights[PartName, Arrival],
        write_behind: WriteBehind,
        counters: StoreCounters,
        max_in_flight: int,
    ) -> None:
        """`max_in_flight` bytes are being saved at most."""
        self.in_flight = 0
        """Bytes of saves under way."""
        self._dram = dram
        self._space = space
        self._threads = threads
        self._flights = flights
        self._write_behind = write_behind
        self._counters = counters
        self._max_in_flight = max_in_flight

    async def save(self, header: Header, payload: memoryview) -> SaveOutcome:
        """See `NodeStore.save`."""
        outcome = await self._save(header, payload)
        self._counters.saves[outcome] += 1
        if outcome == "stored":
            self._counters.saved_bytes += header.nbytes
        return outcome

    async def _save(self, header: Header, payload: memoryview) -> SaveOutcome:
        if not _sound(header, payload):
            return "refused"
        key = ChunkKey(header.key)
        there = self._dram.part(key, header.rank)
        if there is None and not self._dram.fits(header):
            return "refused"
        if there is not None:
            if header.rank == 0:
                self._touched(key, again=True)
            return "present"
        if (key, header.rank) in self._flights:
            # Another save of the same, or on its way from where it was kept.
            return "present"
        if self.in_flight + header.nbytes > self._max_in_flight:
            return self._dropped("in_flight")
        refusal = self._dram.reserve(key, header.nbytes, header.tenant)
        if refusal is not None:
            return self._dropped(refusal)
        self.in_flight += header.nbytes
        flight = self._flights.start((key, header.rank), self._keep(header, payload))
        await settled(flight)
        return "stored" if flight.result().outcome == "loaded" else self._dropped("failed")

    def _dropped(self, why: str) -> SaveOutcome:
        self._counters.drops[why] += 1
        return "dropped"

    async def _keep(self, header: Header, payload: memoryview) -> Arrival:
        held = None
        try:
            held = await self._threads.finish(None, self._space.put, payload)
        except MemoryError as error:
            logger.warning("a save is dropped: %s", error)
        finally:
            self.in_flight -= header.nbytes
            if held is None:
                self._dram.cancel(header.nbytes, header.tenant)
        if held is None:
            return Arrival("no_room")
        if not self._dram.fits(header):
            # Another rank's part came meanwhile and is not like it.
            self._dram.cancel(header.nbytes, header.tenant)
            held.free()
            return Arrival("no_room")
        self._dram.place(header, held, DRAM)
        self._touched(ChunkKey(header.key), again=False)
        return Arrival("loaded", DRAM, header)

    def _touched(self, key: ChunkKey, again: bool) -> None:
        """Once for all ranks: when the last part has come, and with each further save by the first rank."""
        chunk = self._dram.chunks.get(key)
        if chunk is not None and chunk.complete:
            if again:
                self._dram.touch(chunk)
            self._write_behind.touched(chunk)


def _sound(header: Header, payload: memoryview) -> bool:
    return (
        len(header.key) == KEY_BYTES
        and 0 < header.nbytes == payload.nbytes
        and 0 <= header.rank < header.world_size <= MAX_WORLD_SIZE
    )
