"""Prefixes that replicas have just computed for this router, before their own word of it is here.

A replica's KV events take some milliseconds to arrive. A client that asks again at once, as agents do, would find an
index that knows nothing of its last request, and be sent to another replica. Once the replica has been heard again the
index is the truth: it also knows what was evicted since.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cache_store.events import ChunkKey

KEEP_S = 2.0
MAX_PREFIXES = 256
REPORTS = 2
"""Load reports of a replica after which its events of what came before have arrived. The first may have been under way
already."""


class _Prefix(NamedTuple):
    until: float
    number: int
    reports: int
    """How many the replica had sent by then."""
    keys: Sequence[ChunkKey]


class RecentPrefixes:
    """Prefixes by replica, each until the replica was heard again or a while has passed.

    All that is known of a replica is closed under prefixes: it has every chunk before one that it has.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        keep_s: float = KEEP_S,
        max_prefixes: int = MAX_PREFIXES,
    ) -> None:
        """`clock` counts seconds. Of more than `max_prefixes` of one replica the oldest are forgotten early."""
        self._clock = clock
        self._keep_s = keep_s
        self._max_prefixes = max_prefixes
        self._holders: dict[ChunkKey, dict[str, int]] = {}
        """Chunk -> replica -> number of the latest prefix that it belongs to."""
        self._prefixes: dict[str, deque[_Prefix]] = {}
        """Oldest first."""
        self._reports: dict[str, int] = {}
        self._count = 0

    def __len__(self) -> int:
        """Prefixes that are remembered."""
        return sum(map(len, self._prefixes.values()))

    def add(self, replica: str, keys: Sequence[ChunkKey]) -> None:
        """The replica has computed a prompt that begins with the chunks `keys`."""
        if not keys:
            return
        self._expire(replica)
        self._count += 1
        prefixes = self._prefixes.setdefault(replica, deque())
        prefixes.append(
            _Prefix(self._clock() + self._keep_s, self._count, self._reports.get(replica, 0), keys)
        )
        for key in keys:
            self._holders.setdefault(key, {})[replica] = self._count
        if len(prefixes) > self._max_prefixes:
            self._drop_oldest(replica)

    def reported(self, replica: str) -> None:
        """A load report of the replica is here, and all events that it sent before."""
        self._reports[replica] = reports = self._reports.get(replica, 0) + 1
        while (prefixes := self._prefixes.get(replica)) and prefixes[0].reports <= reports - REPORTS:
            self._drop_oldest(replica)

    def forget(self, replica: str) -> None:
        """The replica is gone, or has begun anew."""
        self._reports.pop(replica, None)
        while replica in self._prefixes:
            self._drop_oldest(replica)

    def leading(self, keys: Sequence[ChunkKey]) -> dict[str, int]:
        """Replica -> how many of the leading chunks it has, as far as is known here. Replicas of none are left out."""
        if not keys:
            return {}
        for replica in tuple(self._holders.get(keys[0], ())):
            self._expire(replica)
        return {replica: self._reach(replica, keys) for replica in self._holders.get(keys[0], ())}

    def _reach(self, replica: str, keys: Sequence[ChunkKey]) -> int:
        return bisect_left(
            range(len(keys)), True, key=lambda at: replica not in self._holders.get(keys[at], ())
        )

    def _expire(self, replica: str) -> None:
        now = self._clock()
        while (prefixes := self._prefixes.get(replica)) and prefixes[0].until <= now:
            self._drop_oldest(replica)

    def _drop_oldest(self, replica: str) -> None:
        prefixes = self._prefixes[replica]
        oldest = prefixes.popleft()
        if not prefixes:
            del self._prefixes[replica]
        for key in oldest.keys:
            holders = self._holders.get(key, {})
            if holders.get(replica) == oldest.number:
                del holders[replica]
                if not holders:
                    del self._holders[key]

    def check_integrity(self) -> None:
        """Raises AssertionError where what is looked up is not what is remembered."""
        expected: dict[ChunkKey, dict[str, int]] = {}
        for replica, prefixes in self._prefixes.items():
            assert 0 < len(prefixes) <= self._max_prefixes
            for prefix in prefixes:
                for key in prefix.keys:
                    expected.setdefault(key, {})[replica] = prefix.number
        assert self._holders == expected
