"""What every eviction policy promises, as a machine that any of them can be put into."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_store.events import ChunkKey
from cache_store.eviction import Eviction, eviction_from

NAMES = ("lru", "s3fifo", "cost")


def make_key(number: int) -> ChunkKey:
    return ChunkKey(random.Random(number).randbytes(32))


def nothing(key: ChunkKey) -> bool:
    return False


def insert_all(eviction: Eviction, capacity: int, keys: Iterable[ChunkKey], cost_s: float = 0.0) -> None:
    """Use keys one after the other in a cache of `capacity` chunks of one byte: touch those there, add the others."""
    for key in keys:
        if key in eviction:
            eviction.touch(key)
            continue
        for victim in eviction.victims(len(eviction) + 1 - capacity, nothing):
            eviction.remove(victim)
        eviction.add(key, 1, cost_s)


POOL = [make_key(number) for number in range(16)]

sizes = st.integers(0, 5)
costs = st.sampled_from([0.0, 1e-300, 1e-9, 1e-3, 0.5, 1e300])


class EvictionAgainstSizes(RuleBasedStateMachine):
    """Any use of a policy leaves it with the chunks that it was told of, and victims as its contract says."""

    name: ClassVar[str]

    @initialize()
    def start(self) -> None:
        self.eviction = eviction_from(self.name)
        self.sizes: dict[ChunkKey, int] = {}

    @rule(key=st.sampled_from(POOL), nbytes=sizes, cost_s=costs)
    def add(self, key: ChunkKey, nbytes: int, cost_s: float) -> None:
        self.eviction.add(key, nbytes, cost_s)
        self.sizes[key] = nbytes

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), times=st.integers(1, 6))
    def touch(self, data: st.DataObject, times: int) -> None:
        key = data.draw(st.sampled_from(sorted(self.sizes)))
        for _ in range(times):
            self.eviction.touch(key)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(sorted(self.sizes))))

    @rule(nbytes=st.integers(-1, 40), blocked=st.sets(st.sampled_from(POOL)), evicted=st.integers(0, 16))
    def evict(self, nbytes: int, blocked: set[ChunkKey], evicted: int) -> None:
        """The tier may evict fewer than it asked for."""
        victims = self.eviction.victims(nbytes, blocked.__contains__)
        free = sum(size for key, size in self.sizes.items() if key not in blocked)
        if nbytes <= 0 or nbytes > free:
            assert victims == []
            return
        assert len(victims) == len(set(victims))
        assert set(victims) <= set(self.sizes) - blocked
        assert sum(self.sizes[key] for key in victims) >= nbytes
        assert sum(self.sizes[key] for key in victims[:-1]) < nbytes
        for key in victims[:evicted]:
            self.drop(key)

    def drop(self, key: ChunkKey) -> None:
        self.eviction.remove(key)
        del self.sizes[key]

    @invariant()
    def holds_what_it_was_told(self) -> None:
        self.eviction.check_integrity()
        assert len(self.eviction) == len(self.sizes)
        assert {key for key in POOL if key in self.eviction} == set(self.sizes)
