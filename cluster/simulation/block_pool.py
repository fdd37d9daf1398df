"""A replica's KV memory in whole chunks: those that requests hold, and those that are kept until the room is needed.

As in vLLM, what nobody holds leaves first that was let go first, and of one request the end of its prompt before its
beginning.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache_store.events import ChunkKey
from cache_store.eviction import Lru


class Lease:
    """The blocks of one request: the chunks it shares, and those that are its own."""

    __slots__ = ("keys", "own", "shared")

    def __init__(self, keys: Sequence[ChunkKey], shared: int, own: int) -> None:
        self.keys = keys
        """Of the prompt."""
        self.shared = shared
        """Leading chunks that are in the cache and held."""
        self.own = own
        """Further blocks: chunks not yet computed, the rest of the prompt, the answer."""


class Admitted:
    """What it took to let a request in."""

    __slots__ = ("evicted", "lease")

    def __init__(self, lease: Lease, evicted: list[ChunkKey]) -> None:
        self.lease = lease
        self.evicted = evicted


class BlockPool:
    """Not thread-safe. `capacity` is in blocks of one chunk each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        """Blocks that requests hold, each counted once."""
        self._holders: dict[ChunkKey, int] = {}
        self._idle = Lru()

    def match(self, keys: Sequence[ChunkKey]) -> int:
        """Leading chunks that are there."""
        holders, idle = self._holders, self._idle
        for position, key in enumerate(keys):
            if key not in holders and key not in idle:
                return position
        return len(keys)

    def admit(self, keys: Sequence[ChunkKey], most_shared: int, blocks: int) -> Admitted | None:
        """Hold `blocks` for a request, the leading chunks that are there among them but at most `most_shared`.

        None while requests hold too much; then nothing has changed. What must go for it is named in `evicted`.
        """
        shared = min(self.match(keys), most_shared)
        idle = self._idle
        woken = [key for key in keys[:shared] if key in idle]
        own = blocks - shared
        if self.held + len(woken) + own > self.capacity:
            return None
        holders = self._holders
        for key in woken:
            idle.remove(key)
        for key in keys[:shared]:
            holders[key] = holders.get(key, 0) + 1
        self.held += len(woken) + own
        return Admitted(Lease(keys, shared, own), self._shrink())

    def computed(self, lease: Lease) -> list[ChunkKey]:
        """The prompt's chunks are there now, for others too. Returns those that nobody had computed before."""
        fresh = []
        holders = self._holders
        for key in lease.keys[lease.shared :]:
            if key in holders:
                # Somebody else computed the same meanwhile: two blocks, of which one is found.
                holders[key] += 1
            elif key in self._idle:
                self._idle.remove(key)
                self.held += 1
                holders[key] = 1
            else:
                holders[key] = 1
                lease.own -= 1
                fresh.append(key)
        lease.shared = len(lease.keys)
        return fresh

    def release(self, lease: Lease, answer: Sequence[ChunkKey] = ()) -> list[ChunkKey]:
        """The request has ended, with chunks that its answer filled. Returns those of them that were not there."""
        holders, idle = self._holders, self._idle
        self.held -= lease.own
        fresh = [key for key in answer if key not in holders and key not in idle]
        for key in reversed(fresh):
            idle.add(key, 1, 0.0)
        for key in reversed(lease.keys[: lease.shared]):
            left = holders[key] - 1
            if left:
                holders[key] = left
            else:
                del holders[key]
                self.held -= 1
                idle.add(key, 1, 0.0)
        lease.own = lease.shared = 0
        return fresh

    def clear(self) -> None:
        """The replica is gone, with all that was in it."""
        self.__init__(self.capacity)  # type: ignore[misc]

    def _shrink(self) -> list[ChunkKey]:
        victims = self._idle.victims(self.held + len(self._idle) - self.capacity, _never)
        for key in victims:
            self._idle.remove(key)
        return victims

    def check_integrity(self, leases: Sequence[Lease]) -> None:
        """Raises AssertionError unless what is held is what these requests hold, within the capacity."""
        counted: dict[ChunkKey, int] = {}
        for lease in leases:
            for key in lease.keys[: lease.shared]:
                counted[key] = counted.get(key, 0) + 1
        assert counted == self._holders, f"{len(counted)} chunks are held, {len(self._holders)} recorded"
        own = sum(lease.own for lease in leases)
        assert self.held == len(counted) + own, f"{self.held} held; {len(counted)} shared and {own} own"
        assert not any(key in self._idle for key in counted), "a chunk that is held may not be evicted"
        assert self.held + len(self._idle) <= self.capacity, f"{self.held} + {len(self._idle)} blocks"
        self._idle.check_integrity()


def _never(_: ChunkKey) -> bool:
    return False
