"""What the nodes keep beside their engines' blocks: which chunks, in which tier, when a load is there.

The order of eviction and the admission to disk and remote are those of `cache_store`. Room is counted in whole chunks.
Loads of one node from one source come one after the other, each at the source's full rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from cache_store.admission import Admission, admission_from
from cache_store.events import ChunkKey, Tier
from cache_store.eviction import Eviction, eviction_from
from cache_store.load_cost import chunks_worth_loading
from cache_store.wire import DRAM
from cluster.simulation.config import SimulationConfig
from router.loadable import Loadable

Changed = Callable[[str, Tier, Sequence[ChunkKey], Sequence[ChunkKey]], None]
"""Called with holder, tier, chunks that have come, chunks that have gone."""
_DISK: Tier = "disk"
_REMOTE: Tier = "remote"
REMOTE = "remote"
"""Holder of the tier that all nodes share."""


@dataclass(slots=True)
class Moved:
    """Bytes, over the whole run."""

    loaded: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Loadable._fields, 0))
    """Into engines and their nodes' memory, by where they came from."""
    saved: int = 0
    """From engines to their nodes' memory."""
    written: dict[str, int] = field(default_factory=lambda: {"disk": 0, "remote": 0})
    transferred: int = 0
    """From prefill to decode replicas."""


class Fetched(NamedTuple):
    """A load that has begun."""

    chunks: Loadable
    ready_s: float
    """When the last of it is there."""


class _Shelf:
    """One tier of one holder."""

    def __init__(self, chunks: int, eviction: Eviction, admission: Admission | None) -> None:
        self.room = chunks
        self.order = eviction
        self.keys: set[ChunkKey] = set()
        self._admission = admission

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.keys

    def wants(self, key: ChunkKey) -> bool:
        """Whether a chunk that is at hand should be kept here too. Asking counts."""
        return self.room > 0 and (self._admission is None or self._admission.admit(key))

    def put(self, keys: Sequence[ChunkKey], cost_s: float) -> list[ChunkKey]:
        """Keep chunks that are not there, no more than there is room for. Returns what had to go for them."""
        victims = self.order.victims(len(self.order) + len(keys) - self.room, _never)
        for victim in victims:
            self.order.remove(victim)
        for key in keys:
            self.order.add(key, 1, cost_s)
        self.keys.difference_update(victims)
        self.keys.update(keys)
        return victims

    def check_integrity(self) -> None:
        assert len(self.order) == len(self.keys)
        assert all(key in self.order for key in self.keys)
        assert len(self.order) <= self.room, f"{len(self.order)} chunks in room for {self.room}"
        self.order.check_integrity()


class NodeStores:
    """All nodes' `dram` and `disk`, and `remote`. Not thread-safe."""

    def __init__(self, config: SimulationConfig, nodes: Sequence[str], changed: Changed) -> None:
        tiers, nbytes = config.tiers, config.chunk_bytes
        self.moved = Moved()
        self.enabled = tiers.any
        self._changed = changed
        self._chunk_bytes = nbytes

        def shelf(room: int, eviction: str, admission: str = "") -> _Shelf:
            # An admission remembers what it has seen, at its full size from the start.
            admitted = admission_from(admission) if admission and room else None
            return _Shelf(room // nbytes, eviction_from(eviction), admitted)

        self._dram = {node: shelf(tiers.dram, tiers.dram_eviction) for node in nodes}
        self._disk = {node: shelf(tiers.disk, tiers.disk_eviction, tiers.disk_admission) for node in nodes}
        self._remote = shelf(tiers.remote, tiers.disk_eviction, tiers.remote_admission)
        self._copies: dict[ChunkKey, int] = {}
        """In how many nodes' memory a chunk is."""
        self._times = (tiers.from_dram, tiers.from_peer, tiers.from_disk, tiers.from_remote)
        self._chunk_tokens = config.chunk_tokens
        self._seconds_per_byte = (0.0, *(1 / each.bytes_per_s for each in self._times))
        self._latency_s = (0.0, *(each.latency_s for each in self._times))
        self._free_at = {node: [0.0] * len(self._times) for node in nodes}

    def prefetch(self, node: str, keys: Sequence[ChunkKey], now: float, cost_s: float) -> Fetched:
        """Bring the run of `keys` that is elsewhere into the node's memory, ahead of a load."""
        dram, sources = self._dram[node], self._sources(node, keys)
        counts = (
            self._take(node, keys, sources, cost_s, frozenset((0,))) if dram.room else [0] * len(self._times)
        )
        return Fetched(Loadable(*counts), self._ready_s(node, counts, now))

    def load(self, node: str, keys: Sequence[ChunkKey], now: float, cost_s: float) -> Fetched:
        """Load of the run of `keys` that is there what an engine of the node has sooner so than computed.

        `cost_s` is what computing one takes.
        """
        sources = self._sources(node, keys)
        codes = bytes(source + DRAM for source in sources)
        worth = chunks_worth_loading(
            codes,
            self._chunk_bytes,
            self._chunk_tokens,
            self._seconds_per_byte,
            self._chunk_tokens / cost_s,
            latency_s=self._latency_s,
        )
        counts = self._take(node, keys, sources[:worth], cost_s, frozenset())
        return Fetched(Loadable(*counts), self._ready_s(node, counts, now))

    def save(self, node: str, keys: Sequence[ChunkKey], cost_s: float) -> None:
        """An engine of the node has computed these; `cost_s` is what one took."""
        if self.enabled and keys:
            self.moved.saved += self._keep(node, keys, cost_s) * self._chunk_bytes
            self._write_behind(node, keys, cost_s)

    def _sources(self, node: str, keys: Sequence[ChunkKey]) -> list[int]:
        """Of the run of keys that is anywhere, as numbers in `Loadable`."""
        dram, copies, disk, remote = self._dram[node], self._copies, self._disk[node], self._remote
        found = []
        for key in keys:
            if key in dram:
                found.append(0)
            elif key in copies:
                found.append(1)
            elif key in disk:
                found.append(2)
            elif key in remote:
                found.append(3)
            else:
                break
        return found

    def _take(
        self, node: str, keys: Sequence[ChunkKey], sources: Sequence[int], cost_s: float, but: Set[int]
    ) -> list[int]:
        """Chunks that come from each source, those that come from one of `but` left as they are."""
        counts = [0] * len(self._times)
        shelves = (self._dram[node], None, self._disk[node], self._remote)
        taken = []
        for key, source in zip(keys, sources, strict=False):
            if source in but:
                continue
            counts[source] += 1
            taken.append(key)
            shelf = shelves[source]
            if shelf is not None:
                shelf.order.touch(key)
        if taken:
            for name, count in zip(Loadable._fields, counts, strict=True):
                self.moved.loaded[name] += count * self._chunk_bytes
            self._keep(node, taken, cost_s)
            self._write_behind(node, taken, cost_s)
        return counts

    def _keep(self, node: str, keys: Sequence[ChunkKey], cost_s: float) -> int:
        """In the node's memory; returns how many were not there."""
        dram, copies = self._dram[node], self._copies
        new = [key for key in keys if key not in dram][: dram.room]
        if not new:
            return 0
        gone = dram.put(new, cost_s)
        for key in new:
            copies[key] = copies.get(key, 0) + 1
        for victim in gone:
            if copies[victim] == 1:
                del copies[victim]
            else:
                copies[victim] -= 1
        self._changed(node, "dram", new, gone)
        return len(new)

    def _write_behind(self, node: str, keys: Sequence[ChunkKey], cost_s: float) -> None:
        """To disk and remote, what they admit."""
        for holder, tier, shelf in ((node, _DISK, self._disk[node]), (REMOTE, _REMOTE, self._remote)):
            if not shelf.room:
                continue
            new = [key for key in keys if key not in shelf and shelf.wants(key)][: shelf.room]
            if new:
                self._changed(holder, tier, new, shelf.put(new, cost_s))
                self.moved.written[tier] += len(new) * self._chunk_bytes

    def _ready_s(self, node: str, counts: Sequence[int], now: float) -> float:
        free, ready = self._free_at[node], now
        for source, (count, times) in enumerate(zip(counts, self._times, strict=True)):
            if count:
                free[source] = max(now, free[source]) + count * self._chunk_bytes / times.bytes_per_s
                ready = max(ready, free[source] + times.latency_s)
        return ready

    def check_integrity(self) -> None:
        """Raises AssertionError when a tier has more than it has room for, or copies are miscounted."""
        copies: Counter[ChunkKey] = Counter()
        for shelf in (*self._dram.values(), *self._disk.values(), self._remote):
            shelf.check_integrity()
        for shelf in self._dram.values():
            copies.update(shelf.keys)
        assert dict(copies) == self._copies, "copies in memory are miscounted"


def _never(_: ChunkKey) -> bool:
    return False
