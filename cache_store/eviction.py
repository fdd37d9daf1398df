"""Which chunks leave a tier first."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable

from cache_store.events import ChunkKey
from cache_store.queues import Queues
from cache_store.recent_keys import RecentKeys

Blocked = Callable[[ChunkKey], bool]


class Eviction(ABC):
    """The order in which the chunks of one tier leave it. No I/O, no clock, not thread-safe.

    It never evicts: it names victims, and the tier removes those that it did evict. A chunk is one key here, whatever
    number of parts it has; `nbytes` is what all that are there take.
    """

    _entries: Queues

    @abstractmethod
    def add(self, key: ChunkKey, nbytes: int, cost_s: float) -> None:
        """A chunk that has come. `cost_s` is the seconds that computing it would take; 0 for unknown.

        For a key that is there, its new size and cost; that does not count as a use.
        """

    @abstractmethod
    def touch(self, key: ChunkKey) -> None:
        """A chunk was used. Raises KeyError for one that is not there."""

    @abstractmethod
    def victims(self, nbytes: int, blocked: Blocked) -> list[ChunkKey]:
        """What to evict, in order, to free at least `nbytes`; without the last of them it would be less.

        Those that `blocked` is true of are passed over and stay. Empty when `nbytes` is 0 or less, and when all that
        is not blocked would not be enough: to know that takes a look at every chunk.
        """

    def remove(self, key: ChunkKey) -> None:
        """A chunk that has left, for whatever reason. Raises KeyError for one that is not there."""
        self._entries.remove(self._entries.slot(key))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._entries

    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself."""
        self._entries.check_integrity()


class Lru(Eviction):
    """Least recently used first."""

    def __init__(self) -> None:
        self._entries = Queues(1)

    def add(self, key: ChunkKey, nbytes: int, cost_s: float) -> None:
        if key in self._entries:
            self._entries.resize(self._entries.slot(key), nbytes)
        else:
            self._entries.insert(key, nbytes, 0)

    def touch(self, key: ChunkKey) -> None:
        self._entries.move(self._entries.slot(key), 0)

    def victims(self, nbytes: int, blocked: Blocked) -> list[ChunkKey]:
        return _keys(self._entries, _enough(self._entries, self._entries.walk(0), nbytes, blocked))


class S3Fifo(Eviction):
    """Keeps what is used again apart from what is seen once: most chunks of real traffic are.

    S3-FIFO of Yang et al., "FIFO queues are all you need for cache eviction", SOSP'23. New chunks go through a small
    queue. Those used meanwhile go on to the main queue; the others leave, but are remembered, and go to the main
    queue at once when they come back. The main queue puts back what was used since its last turn, up to three times.
    """

    SMALL, MAIN = 0, 1
    SMALL_SHARE = 0.3
    """Of the bytes. The paper's tenth is shorter than the pause between two turns of a conversation: on the traces
    published with Mooncake (FAST'25) this finds as many leading chunks or more, in caches of 3,000 to 60,000."""
    MAX_VISITS = 3

    def __init__(self) -> None:
        self._entries = Queues(2)
        self._visits = bytearray()
        self._ghosts = RecentKeys(512)
        """Keys that left the small queue, about as many as there are chunks."""

    def add(self, key: ChunkKey, nbytes: int, cost_s: float) -> None:
        if key in self._entries:
            self._entries.resize(self._entries.slot(key), nbytes)
            return
        slot = self._entries.insert(key, nbytes, self.MAIN if key in self._ghosts else self.SMALL)
        self._visits.extend(bytes(max(0, slot + 1 - len(self._visits))))
        self._visits[slot] = 0
        self._ghosts.discard(key)

    def touch(self, key: ChunkKey) -> None:
        slot = self._entries.slot(key)
        self._visits[slot] = min(self._visits[slot] + 1, self.MAX_VISITS)

    def victims(self, nbytes: int, blocked: Blocked) -> list[ChunkKey]:
        if nbytes > self._entries.used(self.SMALL) + self._entries.used(self.MAIN):
            return []
        chosen: list[int] = []
        # By queue: the last slot that was passed and stays, and the bytes that would be left.
        passed = [self.SMALL, self.MAIN]
        freed = [0, 0]
        while sum(freed) < nbytes:
            left = [self._entries.used(queue) - freed[queue] for queue in (self.SMALL, self.MAIN)]
            first = self.SMALL if left[self.SMALL] > self.SMALL_SHARE * sum(left) else self.MAIN
            queue, slot = first, self._next(first, passed, blocked)
            if slot is None:
                queue = self.MAIN if first == self.SMALL else self.SMALL
                slot = self._next(queue, passed, blocked)
            if slot is None and first == self.MAIN:
                # The small queue may have passed on to the main queue what that did not have before.
                queue, slot = first, self._next(first, passed, blocked)
            if slot is None:
                return []
            chosen.append(slot)
            freed[queue] += self._entries.nbytes(slot)
        self._remember(slot for slot in chosen if self._entries.queue(slot) == self.SMALL)
        return _keys(self._entries, chosen)

    def _next(self, queue: int, passed: list[int], blocked: Blocked) -> int | None:
        """The next victim of a queue behind `passed`, putting those that were used where they belong."""
        while (slot := self._entries.newer(passed[queue])) != queue:
            if blocked(self._entries.key(slot)):
                passed[queue] = slot
            elif not self._visits[slot]:
                passed[queue] = slot
                return slot
            else:
                self._visits[slot] = 0 if queue == self.SMALL else self._visits[slot] - 1
                self._entries.move(slot, self.MAIN)
        return None

    def _remember(self, slots: Iterable[int]) -> None:
        if len(self._entries) > self._ghosts.capacity:
            self._ghosts.double()
        for slot in slots:
            self._ghosts.add(self._entries.key(slot))

    def check_integrity(self) -> None:
        super().check_integrity()
        assert max(self._visits, default=0) <= self.MAX_VISITS


class CostAware(Eviction):
    """Keeps the chunks that save most seconds per byte: those that take long to compute, and those used often.

    Greedy-Dual-Size-Frequency (Cherkasova, HP Labs 1998): a chunk's rank is its worth, uses * seconds / bytes, on top
    of the floor when it was last used, and the lowest rank leaves. The floor is the rank of the last victim, so that
    what is not used any more sinks beneath what comes. As in CAMP (Ghandeharizadeh et al., Middleware'14) worths are
    rounded, here to powers of the square root of two, with a queue for each: a queue is in order by itself, and only
    the queues' oldest need be compared.
    """

    LOWEST, HIGHEST = -80, -8
    """Powers of the square root of two, in seconds per byte, that are told apart: 1 s per TiB to 1 s per 16 bytes.
    A narrow range, for even the lowest worth must count in a sum with a floor that grew out of the highest."""
    MAX_USES = 255
    TYPICAL = 1e-9
    """Seconds per byte where the cost is unknown and none was known before: an 8B model on a data centre GPU."""

    def __init__(self) -> None:
        self._entries = Queues(self.HIGHEST - self.LOWEST + 1)
        self._uses = bytearray()
        self._cost_s = array("d")
        self._rank = array("d")
        self._floor = 0.0
        self._typical = 0.0
        """Seconds per byte, averaged over what came lately with a cost; 0 before any did."""

    def add(self, key: ChunkKey, nbytes: int, cost_s: float) -> None:
        if key in self._entries:
            slot = self._entries.slot(key)
            self._entries.resize(slot, nbytes)
        else:
            slot = self._entries.insert(key, nbytes, 0)
            new = max(0, slot + 1 - len(self._uses))
            self._uses.extend(bytes(new))
            self._cost_s.frombytes(bytes(8 * new))
            self._rank.frombytes(bytes(8 * new))
            self._uses[slot] = 1
        self._cost_s[slot] = self._cost_of(nbytes, cost_s)
        self._raise(slot)

    def touch(self, key: ChunkKey) -> None:
        slot = self._entries.slot(key)
        self._uses[slot] = min(self._uses[slot] + 1, self.MAX_USES)
        self._raise(slot)

    def victims(self, nbytes: int, blocked: Blocked) -> list[ChunkKey]:
        # Most queues are empty, and the merge sets up each one that it gets.
        queues = [
            queue for queue in range(self.HIGHEST - self.LOWEST + 1) if self._entries.newer(queue) != queue
        ]
        slots = heapq.merge(*map(self._entries.walk, queues), key=self._rank.__getitem__)
        chosen = _enough(self._entries, slots, nbytes, blocked)
        if chosen:
            self._floor = max(self._floor, self._rank[chosen[-1]])
        return _keys(self._entries, chosen)

    def _cost_of(self, nbytes: int, cost_s: float) -> float:
        if cost_s <= 0:
            return (self._typical or self.TYPICAL) * nbytes
        per_byte = cost_s / max(nbytes, 1)
        self._typical += (per_byte - self._typical) * (0.05 if self._typical else 1.0)
        return cost_s

    def _raise(self, slot: int) -> None:
        """To the rank of a chunk that is used now."""
        worth = self._uses[slot] * self._cost_s[slot] / max(self._entries.nbytes(slot), 1)
        power = round(2 * math.log2(worth)) if worth > 0 else self.LOWEST
        power = min(max(power, self.LOWEST), self.HIGHEST)
        self._rank[slot] = self._floor + 2 ** (power / 2)
        self._entries.move(slot, power - self.LOWEST)

    def check_integrity(self) -> None:
        super().check_integrity()
        for queue in range(self.HIGHEST - self.LOWEST + 1):
            ranks = [self._rank[slot] for slot in self._entries.walk(queue)]
            assert ranks == sorted(ranks), f"queue {queue} is out of order"
            assert all(rank <= self._floor + 2 ** ((queue + self.LOWEST) / 2) for rank in ranks)


_BY_NAME: dict[str, type[Eviction]] = {"lru": Lru, "s3fifo": S3Fifo, "cost": CostAware}


def eviction_from(name: str) -> Eviction:
    """An empty one, by its name in a configuration. Raises KeyError for another name."""
    return _BY_NAME[name]()


def _enough(entries: Queues, slots: Iterable[int], nbytes: int, blocked: Blocked) -> list[int]:
    """The first slots that are not blocked and have `nbytes` together; empty when all have less."""
    chosen: list[int] = []
    if nbytes <= 0:
        return chosen
    for slot in slots:
        if not blocked(entries.key(slot)):
            chosen.append(slot)
            nbytes -= entries.nbytes(slot)
            if nbytes <= 0:
                return chosen
    return []


def _keys(entries: Queues, slots: Iterable[int]) -> list[ChunkKey]:
    return [entries.key(slot) for slot in slots]
