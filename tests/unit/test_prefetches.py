"""Chunks that are kept for requests to come: until those come, for a while at most, and never too many bytes."""

from __future__ import annotations

import random

import pytest

from cache_store.events import ChunkKey
from cache_store.leases import Leases
from cache_store.prefetches import MOST_PREFETCHES, Prefetches
from tests.store_rig import Clock, key

LEASE_S = 10.0
SIZE = 100


def keys(*numbers: int) -> list[ChunkKey]:
    return [key(number) for number in numbers]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> Leases:
    return Leases(clock)


@pytest.fixture
def prefetches(leases: Leases, clock: Clock) -> Prefetches:
    return Prefetches(leases, 4 * SIZE, LEASE_S, clock)


def held(leases: Leases, *numbers: int) -> list[int]:
    return [number for number in numbers if leases.held(key(number))]


def test_chunks_stay_until_their_request_comes(prefetches: Prefetches, leases: Leases) -> None:
    assert prefetches.begin(keys(1, 2), SIZE) == 2
    assert held(leases, 1, 2, 3) == [1, 2]
    prefetches.come(keys(5, 6))
    prefetches.come(keys(1))
    assert held(leases, 1, 2) == [1, 2]
    prefetches.come(keys(1, 2, 3))
    assert (held(leases, 1, 2), len(prefetches), prefetches.bytes) == ([], 0, 0)


def test_chunks_for_which_nobody_comes_stay_for_a_while(
    prefetches: Prefetches, leases: Leases, clock: Clock
) -> None:
    prefetches.begin(keys(1, 2), SIZE)
    clock.now += LEASE_S - 1
    prefetches.begin(keys(3), SIZE)
    clock.now += 1
    prefetches.expire()
    assert held(leases, 1, 2, 3) == [3]
    prefetches.check_integrity()


def test_a_request_ends_one_prefetch_that_of_its_longest_prefix(
    prefetches: Prefetches, leases: Leases
) -> None:
    """Two requests of one conversation, and one that says the same as the second."""
    for prompt in (keys(1, 2), keys(1, 2, 3), keys(1, 2, 3)):
        prefetches.begin(prompt, SIZE)
    prefetches.come(keys(1, 2, 3, 4))
    assert (len(prefetches), held(leases, 1, 2, 3)) == (2, [1, 2, 3])
    prefetches.come(keys(1, 2, 3, 4))
    assert (len(prefetches), held(leases, 1, 2, 3)) == (1, [1, 2])
    prefetches.come(keys(1, 2))
    assert not len(prefetches)


def test_of_a_prefix_for_which_there_is_no_room_the_beginning_is_kept(
    prefetches: Prefetches, leases: Leases
) -> None:
    assert prefetches.begin(keys(1, 2, 3), SIZE) == 3
    assert prefetches.begin(keys(4, 5, 6), SIZE) == 1
    assert prefetches.begin(keys(7), SIZE) == 0
    assert held(leases, *range(1, 8)) == [1, 2, 3, 4]
    prefetches.come(keys(4, 5, 6))
    assert prefetches.begin(keys(7), SIZE) == 1


def test_chunks_that_several_wait_for_take_room_once(prefetches: Prefetches) -> None:
    for _ in range(5):
        assert prefetches.begin(keys(1, 2, 3, 4), SIZE) == 4
    assert prefetches.bytes == 4 * SIZE
    prefetches.check_integrity()


def test_the_size_of_chunks_from_elsewhere_counts_once_it_is_known(
    prefetches: Prefetches, leases: Leases
) -> None:
    assert prefetches.begin(keys(1, 2, 3), 0) == 3
    assert prefetches.wanted(key(1), 3 * SIZE)
    assert not prefetches.wanted(key(2), 3 * SIZE)
    assert prefetches.wanted(key(1), 3 * SIZE), "it is known and counts already"
    assert not prefetches.wanted(key(9), SIZE)
    assert prefetches.bytes == 3 * SIZE
    engine = leases.take(keys(2, 9), 60)
    assert prefetches.wanted(key(2), 3 * SIZE)
    assert prefetches.wanted(key(9), SIZE)
    leases.release(engine)
    assert not prefetches.wanted(key(2), 3 * SIZE)
    leases.pin(key(2))
    assert prefetches.wanted(key(2), 3 * SIZE)


def test_a_prefetch_that_comes_after_its_request_keeps_nothing(
    prefetches: Prefetches, leases: Leases
) -> None:
    lease = leases.take(keys(1, 2), 60)
    assert prefetches.begin(keys(1, 2), SIZE) == 2
    leases.release(lease)
    assert held(leases, 1, 2) == []
    assert not len(prefetches)


def test_so_many_are_waited_for(prefetches: Prefetches, clock: Clock) -> None:
    for _ in range(MOST_PREFETCHES):
        assert prefetches.begin(keys(1), SIZE) == 1
    assert prefetches.begin(keys(1), SIZE) == 0
    clock.now += LEASE_S
    assert prefetches.begin(keys(1), SIZE) == 1


@pytest.mark.parametrize("seed", range(5))
def test_random_schedules(prefetches: Prefetches, leases: Leases, clock: Clock, seed: int) -> None:
    rng = random.Random(seed)
    engines: list[int] = []
    for _ in range(500):
        first = rng.randrange(6)
        some = keys(*range(first, first + rng.randrange(1, 5)))
        step = rng.randrange(6)
        if step == 0:
            prefetches.begin(some, rng.choice([0, SIZE, 2 * SIZE]))
        elif step == 1:
            prefetches.come(some)
        elif step == 2:
            prefetches.wanted(some[0], rng.choice([SIZE, 3 * SIZE]))
        elif step == 3:
            engines.append(leases.take(some, rng.choice([1.0, 60.0])))
        elif step == 4 and engines:
            leases.release(engines.pop())
        else:
            clock.now += rng.random() * LEASE_S / 2
            prefetches.expire()
            leases.expire()
        prefetches.check_integrity()
        leases.check_integrity()
    clock.now += 100
    prefetches.expire()
    leases.expire()
    assert (len(prefetches), prefetches.bytes, len(leases)) == (0, 0, 0)
