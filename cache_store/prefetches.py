"""Chunks kept for requests that have not come yet: for a while, and not too many of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cache_store.events import ChunkKey
from cache_store.leases import MAX_LEASE_S, Leases

MOST_PREFETCHES = 1024
"""Requests that are waited for at once."""


class _Prefetch(NamedTuple):
    keys: tuple[ChunkKey, ...]
    until: float


class _Kept:
    __slots__ = ("nbytes", "prefetches")

    def __init__(self) -> None:
        self.prefetches = 0
        self.nbytes = 0
        """0 for not known yet."""


class Prefetches:
    """Leases of routers. One ends when an engine asks for its chunks, whose own lease then keeps them, and after
    `lease_s` in any case. All of them together keep `limit` bytes at most.

    Belongs to the store's loop.
    """

    def __init__(self, leases: Leases, limit: int, lease_s: float, clock: Callable[[], float]) -> None:
        self.bytes = 0
        """Of the chunks that are kept, as far as their size is known."""
        self._leases = leases
        self._limit = limit
        self._lease_s = min(lease_s, MAX_LEASE_S / 2)
        self._clock = clock
        self._prefetches: dict[int, _Prefetch] = {}
        """By lease, the oldest first."""
        self._by_last: dict[ChunkKey, deque[int]] = {}
        """Leases by the last of their chunks, the oldest first."""
        self._kept: dict[ChunkKey, _Kept] = {}

    def __len__(self) -> int:
        return len(self._prefetches)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._kept

    def begin(self, keys: Sequence[ChunkKey], nbytes: int) -> int:
        """Keep the leading chunks of `nbytes` each (0: not known) for which there is room; how many those are. Chunks
        that an engine keeps need nobody else: the request may have come before its prefetch."""
        self.expire()
        if keys and self._is_with_engine(keys[-1]):
            return len(keys)
        count = self._room_for(keys, nbytes) if len(self._prefetches) < MOST_PREFETCHES else 0
        if not count:
            return 0
        kept = tuple(keys[:count])
        # Ended here, and not by its own time.
        lease = self._leases.take(kept, 2 * self._lease_s)
        self._prefetches[lease] = _Prefetch(kept, self._clock() + self._lease_s)
        self._by_last.setdefault(kept[-1], deque()).append(lease)
        for key in kept:
            one = self._kept.setdefault(key, _Kept())
            one.prefetches += 1
            self._size(one, nbytes)
        return count

    def _room_for(self, keys: Sequence[ChunkKey], nbytes: int) -> int:
        room = self._limit - self.bytes
        for count, key in enumerate(keys):
            one = self._kept.get(key)
            if one is None or not one.nbytes:
                room -= nbytes
                if room < 0:
                    return count
        return len(keys)

    def _size(self, one: _Kept, nbytes: int) -> None:
        if not one.nbytes:
            one.nbytes = nbytes
            self.bytes += nbytes

    def wanted(self, key: ChunkKey, nbytes: int) -> bool:
        """Whether to bring a chunk, which turns out to be of so many bytes, to memory: an engine has leased it, or it
        is kept here and there is room for that."""
        one = self._kept.get(key)
        if one is None or self._is_with_engine(key) or self._leases.is_pinned(key):
            return self._leases.held(key)
        if not one.nbytes and self.bytes + nbytes > self._limit:
            return False
        self._size(one, nbytes)
        return True

    def _is_with_engine(self, key: ChunkKey) -> bool:
        one = self._kept.get(key)
        return self._leases.holders(key) > (one.prefetches if one is not None else 0)

    def come(self, keys: Sequence[ChunkKey]) -> None:
        """A request for these has come: it ends the oldest prefetch of the longest of its prefixes that has one."""
        if self._prefetches:
            for key in reversed(keys):
                if key in self._by_last:
                    self._end(self._by_last[key][0])
                    return

    def expire(self) -> None:
        """End those that nobody came for."""
        now = self._clock()
        for lease, prefetch in list(self._prefetches.items()):
            if prefetch.until > now:
                break
            self._end(lease)

    def _end(self, lease: int) -> None:
        self._leases.release(lease)
        keys = self._prefetches.pop(lease).keys
        same = self._by_last[keys[-1]]
        same.popleft()
        if not same:
            del self._by_last[keys[-1]]
        for key in keys:
            one = self._kept[key]
            one.prefetches -= 1
            if not one.prefetches:
                self.bytes -= one.nbytes
                del self._kept[key]

    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself."""
        count: dict[ChunkKey, int] = {}
        for prefetch in self._prefetches.values():
            for key in prefetch.keys:
                count[key] = count.get(key, 0) + 1
        assert count == {key: one.prefetches for key, one in self._kept.items()}
        assert self.bytes == sum(one.nbytes for one in self._kept.values()) <= self._limit
        by_last = [lease for leases in self._by_last.values() for lease in leases]
        assert sorted(by_last) == sorted(self._prefetches)
        assert all(self._leases.holders(key) >= number for key, number in count.items())
