"""Prefixes that replicas have just computed for this router, before their own word of it is here.

A replica's KV events take some milliseconds to arrive. A client that asks again at once, as agents do, would find an
index that knows nothing of its last request, and be sent to another replica.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence

from cache_store.events import ChunkKey

KEEP_S = 2.0
MAX_PREFIXES = 4096


class RecentPrefixes:
    """Prefixes by replica, each for a while after it was computed; after that the index alone is believed.

    All that is known of a replica is closed under prefixes: it has every chunk before one that it has.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        keep_s: float = KEEP_S,
        max_prefixes: int = MAX_PREFIXES,
    ) -> None:
        """`clock` counts seconds. Of more than `max_prefixes` the oldest are forgotten early."""
        self._clock = clock
        self._keep_s = keep_s
        self._max_prefixes = max_prefixes
        self._holders: dict[ChunkKey, dict[str, int]] = {}
        """Chunk -> replica -> number of the latest prefix that it belongs to."""
        self._prefixes: deque[tuple[float, int, str, Sequence[ChunkKey]]] = deque()
        """(until when, number, replica, keys), oldest first."""
        self._count = 0

    def __len__(self) -> int:
        """Prefixes that are remembered."""
        return len(self._prefixes)

    def add(self, replica: str, keys: Sequence[ChunkKey]) -> None:
        """The replica has computed a prompt that begins with the chunks `keys`."""
        if not keys:
            return
        self._count += 1
        self._prefixes.append((self._clock() + self._keep_s, self._count, replica, keys))
        for key in keys:
            self._holders.setdefault(key, {})[replica] = self._count
        while len(self._prefixes) > self._max_prefixes:
            self._drop_oldest()

    def leading(self, keys: Sequence[ChunkKey]) -> dict[str, int]:
        """Replica -> how many of the leading chunks it has, as far as is known here. Replicas of none are left out."""
        now = self._clock()
        while self._prefixes and self._prefixes[0][0] <= now:
            self._drop_oldest()
        if not keys:
            return {}
        return {replica: self._reach(replica, keys) for replica in self._holders.get(keys[0], ())}

    def _reach(self, replica: str, keys: Sequence[ChunkKey]) -> int:
        return bisect_left(
            range(len(keys)), True, key=lambda at: replica not in self._holders.get(keys[at], ())
        )

    def _drop_oldest(self) -> None:
        _, number, replica, keys = self._prefixes.popleft()
        for key in keys:
            holders = self._holders.get(key, {})
            if holders.get(replica) == number:
                del holders[replica]
                if not holders:
                    del self._holders[key]

    def check_integrity(self) -> None:
        """Raises AssertionError where what is looked up is not what is remembered."""
        expected: dict[ChunkKey, dict[str, int]] = {}
        for _, number, replica, keys in self._prefixes:
            for key in keys:
                expected.setdefault(key, {})[replica] = number
        assert self._holders == expected
        assert len(self._prefixes) <= self._max_prefixes
