"""Who needs which chunks to stay: leases, which end by themselves, and pins, which do not."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cache_store.events import ChunkKey

MAX_LEASE_S = 600.0


class _Lease(NamedTuple):
    keys: tuple[ChunkKey, ...]
    until: float


class Leases:
    """Leases count per chunk: it is held until the last one has ended. A pin is there or not."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = 0
        self._leases: dict[int, _Lease] = {}
        self._ends: list[tuple[float, int]] = []
        """A heap; leases that were released stay in it until their time."""
        self._holders: dict[ChunkKey, int] = {}
        self._pins: set[ChunkKey] = set()

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def leased(self) -> int:
        """Chunks under a lease."""
        return len(self._holders)

    @property
    def pins(self) -> int:
        return len(self._pins)

    def take(self, keys: Iterable[ChunkKey], seconds: float) -> int:
        """The new lease's number, 0 for no keys. It lasts `MAX_LEASE_S` at most."""
        held = tuple(keys)
        if not held:
            return 0
        self._last += 1
        until = self._clock() + (min(seconds, MAX_LEASE_S) if seconds > 0 else 0.0)
        self._leases[self._last] = _Lease(held, until)
        heapq.heappush(self._ends, (until, self._last))
        holders = self._holders
        for key in held:
            holders[key] = holders.get(key, 0) + 1
        return self._last

    def release(self, lease: int) -> bool:
        """Whether there was such a lease."""
        ended = self._leases.pop(lease, None)
        if ended is None:
            return False
        for key in ended.keys:
            left = self._holders[key] - 1
            if left:
                self._holders[key] = left
            else:
                del self._holders[key]
        return True

    def expire(self) -> int:
        """End the leases whose time is over; how many those were."""
        now, ended = self._clock(), 0
        while self._ends and self._ends[0][0] <= now:
            ended += self.release(heapq.heappop(self._ends)[1])
        return ended

    def held(self, key: ChunkKey) -> bool:
        """Whether the chunk must stay, for a lease or a pin."""
        return key in self._holders or key in self._pins

    def holders(self, key: ChunkKey) -> int:
        """Leases of the chunk."""
        return self._holders.get(key, 0)

    def is_leased(self, key: ChunkKey) -> bool:
        return key in self._holders

    def is_pinned(self, key: ChunkKey) -> bool:
        return key in self._pins

    def pin(self, key: ChunkKey) -> None:
        self._pins.add(key)

    def unpin(self, key: ChunkKey) -> bool:
        """Whether it was pinned."""
        if key not in self._pins:
            return False
        self._pins.remove(key)
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself."""
        count: dict[ChunkKey, int] = {}
        for lease in self._leases.values():
            for key in lease.keys:
                count[key] = count.get(key, 0) + 1
        assert count == self._holders
        assert all(holders > 0 for holders in self._holders.values())
        assert {(lease.until, number) for number, lease in self._leases.items()} <= set(self._ends)
        assert all(number <= self._last for _, number in self._ends)
