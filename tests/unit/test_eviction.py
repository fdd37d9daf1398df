"""Eviction: what all policies promise, and what each of them is chosen for."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import OrderedDict

import pytest
from eviction_kit import NAMES, POOL, EvictionAgainstSizes, insert_all, make_key, nothing
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from cache_store.events import ChunkKey
from cache_store.eviction import CostAware, Eviction, Lru, S3Fifo, eviction_from
from cache_store.queues import Queues

ENTRIES = 100_000
MIB = 2**20


def leaving_order(eviction: Eviction) -> list[ChunkKey]:
    """The keys of a cache of chunks of one byte, in the order in which they leave when nothing is used any more."""
    order = []
    while eviction:
        (key,) = eviction.victims(1, nothing)
        eviction.remove(key)
        order.append(key)
    return order


def holding(eviction: Eviction, keys: list[ChunkKey]) -> int:
    return sum(key in eviction for key in keys)


@pytest.mark.parametrize("name", NAMES)
def test_any_use_of_a_policy_keeps_its_contract(name: str) -> None:
    machine = type("Machine", (EvictionAgainstSizes,), {"name": name})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_knows_only_what_it_was_told(name: str) -> None:
    eviction = eviction_from(name)
    assert eviction.victims(1, nothing) == []
    for forbidden in (eviction.touch, eviction.remove):
        with pytest.raises(KeyError):
            forbidden(POOL[0])


def test_a_policy_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError, match="fifo"):
        eviction_from("fifo")


@pytest.mark.parametrize("name", NAMES)
def test_blocked_chunks_are_passed_over_and_leave_when_they_are_not_blocked_any_more(name: str) -> None:
    eviction = eviction_from(name)
    for key in POOL:
        eviction.add(key, 1, 0.0)
    blocked = set(POOL[::2])
    assert set(eviction.victims(8, blocked.__contains__)) == set(POOL[1::2])
    assert eviction.victims(9, blocked.__contains__) == []
    assert set(eviction.victims(16, nothing)) == set(POOL)


@pytest.mark.parametrize("name", NAMES)
def test_a_chunk_that_grows_counts_with_its_new_size(name: str) -> None:
    eviction = eviction_from(name)
    eviction.add(POOL[0], 10, 0.1)
    assert eviction.victims(20, nothing) == []
    eviction.add(POOL[0], 20, 0.1)
    assert len(eviction) == 1
    assert eviction.victims(20, nothing) == [POOL[0]]


@pytest.mark.parametrize("name", NAMES)
def test_an_entry_takes_little_memory_beside_its_key_ghosts_included(name: str) -> None:
    source = random.Random(2)
    keys = [ChunkKey(source.randbytes(32)) for _ in range(ENTRIES + ENTRIES // 8)]
    tracemalloc.start()
    try:
        eviction = eviction_from(name)
        insert_all(eviction, ENTRIES, keys, cost_s=1e-6)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(eviction) == ENTRIES
    assert taken < 200 * ENTRIES


@given(
    uses=st.lists(st.sampled_from(POOL), max_size=60),
    nbytes=st.integers(1, 16),
    blocked=st.sets(st.sampled_from(POOL)),
)
def test_lru_evicts_what_was_used_least_recently(
    uses: list[ChunkKey], nbytes: int, blocked: set[ChunkKey]
) -> None:
    eviction, model = Lru(), OrderedDict[ChunkKey, None]()
    for key in uses:
        if key in model:
            eviction.touch(key)
            model.move_to_end(key)
        else:
            eviction.add(key, 1, 0.0)
            model[key] = None
    free = [key for key in model if key not in blocked]
    assert eviction.victims(nbytes, blocked.__contains__) == (free[:nbytes] if nbytes <= len(free) else [])


def test_s3fifo_keeps_what_is_used_through_a_scan_that_empties_lru() -> None:
    hot = [make_key(number) for number in range(50)]
    held = {}
    for name in ("lru", "s3fifo"):
        eviction, scan = eviction_from(name), iter(range(1_000, 10_000))
        for _ in range(20):
            insert_all(eviction, 100, hot)
            insert_all(eviction, 100, (make_key(next(scan)) for _ in range(200)))
        held[name] = holding(eviction, hot)
    assert held == {"lru": 0, "s3fifo": 50}


def test_s3fifo_lets_what_was_seen_once_leave_before_what_was_used() -> None:
    eviction = S3Fifo()
    insert_all(eviction, 16, POOL)
    used = POOL[:4]
    insert_all(eviction, 16, used)
    assert not set(leaving_order(eviction)[:11]) & set(used)


def test_s3fifo_remembers_what_left_too_early() -> None:
    eviction = S3Fifo()
    insert_all(eviction, 10, (make_key(number) for number in range(20)))
    came_back = make_key(0)
    assert came_back not in eviction
    insert_all(eviction, 10, [came_back])
    insert_all(eviction, 10, (make_key(number) for number in range(100, 200)))
    assert came_back in eviction
    assert make_key(19) not in eviction


def test_s3fifo_does_not_remember_what_was_removed_for_another_reason() -> None:
    eviction = S3Fifo()
    insert_all(eviction, 10, POOL[:10])
    eviction.remove(POOL[0])
    insert_all(eviction, 10, [POOL[0]])
    insert_all(eviction, 10, (make_key(number) for number in range(100, 200)))
    assert POOL[0] not in eviction


def test_s3fifo_does_not_remember_what_came_back() -> None:
    eviction, came_back = S3Fifo(), make_key(0)
    insert_all(eviction, 10, (make_key(number) for number in range(20)))
    insert_all(eviction, 10, [came_back])
    eviction.remove(came_back)
    insert_all(eviction, 10, [came_back])
    insert_all(eviction, 10, (make_key(number) for number in range(100, 200)))
    assert came_back not in eviction


def test_s3fifo_counts_no_use_of_a_chunk_for_the_next_one() -> None:
    eviction = S3Fifo()
    insert_all(eviction, 10, POOL[:10] * 2)
    for key in POOL[:10]:
        eviction.remove(key)
    once = [make_key(number) for number in range(100, 110)]
    insert_all(eviction, 10, once)
    insert_all(eviction, 10, (make_key(number) for number in range(200, 300)))
    assert holding(eviction, once) == 0


def all_in_main(keys: list[ChunkKey]) -> S3Fifo:
    """With these keys, none of them used since it came to the main queue."""
    eviction = S3Fifo()
    insert_all(eviction, len(keys), keys * 2)
    assert eviction.victims(len(keys), nothing) == keys
    return eviction


@pytest.mark.parametrize(
    ("uses", "order"),
    [((0, 0, 0), (0, 1, 2)), ((3, 1, 0), (2, 1, 0)), ((2, 2, 1), (2, 0, 1)), ((200, 3, 0), (2, 0, 1))],
)
def test_s3fifo_puts_back_what_is_used_in_the_main_queue_once_per_use_up_to_three_times(
    uses: tuple[int, ...], order: tuple[int, ...]
) -> None:
    keys = POOL[:3]
    eviction = all_in_main(keys)
    for key, times in zip(keys, uses, strict=True):
        for _ in range(times):
            eviction.touch(key)
    assert leaving_order(eviction) == [keys[number] for number in order]


def test_s3fifo_finds_the_only_chunk_that_is_not_blocked_in_either_queue() -> None:
    eviction = all_in_main(POOL[:10])
    eviction.add(POOL[10], 1, 0.0)
    eviction.touch(POOL[10])
    assert eviction.victims(1, set(POOL[:10]).__contains__) == [POOL[10]]


def test_s3fifo_finds_victims_even_when_all_was_used() -> None:
    eviction = S3Fifo()
    insert_all(eviction, 16, POOL * 5)
    assert set(eviction.victims(16, nothing)) == set(POOL)


def test_s3fifo_remembers_about_as_many_as_it_has() -> None:
    eviction = S3Fifo()
    first = [make_key(number) for number in range(2_000)]
    insert_all(eviction, 2_000, first)
    insert_all(eviction, 2_000, (make_key(number) for number in range(2_000, 4_000)))
    assert holding(eviction, first) == 0
    insert_all(eviction, 2_000, first)
    insert_all(eviction, 2_000, (make_key(number) for number in range(10_000, 14_000)))
    assert holding(eviction, first) > 700


def test_cost_aware_keeps_what_takes_longest_to_compute_per_byte() -> None:
    eviction = CostAware()
    dear = [make_key(number) for number in range(5)]
    large = [make_key(number) for number in range(5, 10)]
    cheap = [make_key(number) for number in range(10, 15)]
    for key in dear:
        eviction.add(key, MIB, 1.0)
    for key in large:
        eviction.add(key, 64 * MIB, 1.0)
    for key in cheap:
        eviction.add(key, MIB, 0.001)
    everything = eviction.victims((5 + 5 * 64 + 5) * MIB, nothing)
    assert everything == cheap + large + dear


def test_cost_aware_keeps_dear_chunks_where_lru_does_not() -> None:
    dear = [make_key(number) for number in range(20)]
    held = {}
    for name in ("lru", "cost"):
        eviction = eviction_from(name)
        insert_all(eviction, 100, dear, cost_s=50.0)
        insert_all(eviction, 100, (make_key(number) for number in range(100, 1_000)), cost_s=0.001)
        held[name] = holding(eviction, dear)
    assert held == {"lru": 0, "cost": 20}


def test_cost_aware_counts_uses_and_treats_equals_by_recency() -> None:
    eviction = CostAware()
    for key in POOL[:4]:
        eviction.add(key, MIB, 0.1)
    for _ in range(8):
        eviction.touch(POOL[0])
    for key in (POOL[2], POOL[3], POOL[1]):
        eviction.touch(key)
    assert eviction.victims(4 * MIB, nothing) == [POOL[2], POOL[3], POOL[1], POOL[0]]


def test_cost_aware_lets_go_in_the_end_of_what_is_not_used_any_more() -> None:
    eviction, dear = CostAware(), make_key(0)
    insert_all(eviction, 10, [dear], cost_s=1e-6)
    insert_all(eviction, 10, (make_key(number) for number in range(1, 500)), cost_s=1e-8)
    assert dear in eviction
    insert_all(eviction, 10, (make_key(number) for number in range(500, 2_500)), cost_s=1e-8)
    assert dear not in eviction


def test_cost_aware_ranks_by_recency_again_after_an_absurd_cost() -> None:
    eviction = CostAware()
    eviction.add(POOL[0], 1, 1e300)
    assert eviction.victims(1, nothing) == [POOL[0]]
    eviction.remove(POOL[0])
    keys = [make_key(number) for number in range(200)]
    insert_all(eviction, 20, keys[:100], cost_s=1e-12)
    insert_all(eviction, 20, keys[100:], cost_s=1e-9)
    assert holding(eviction, keys[180:]) == 20


def test_cost_aware_takes_an_unknown_cost_for_a_usual_one() -> None:
    eviction = CostAware()
    for key in POOL[:3]:
        eviction.add(key, MIB, 0.2)
    eviction.add(POOL[3], MIB, 0.0)
    eviction.add(POOL[4], MIB, 0.01)
    assert eviction.victims(5 * MIB, nothing) == [POOL[4], *POOL[:4]]


def test_queues_use_slots_again() -> None:
    queues = Queues(3)
    slots = {queues.insert(key, 1, number % 3) for number, key in enumerate(POOL)}
    for key in POOL:
        queues.remove(queues.slot(key))
    queues.check_integrity()
    order = random.Random(1).sample(POOL, len(POOL))
    assert {queues.insert(key, 2, 1) for key in order} == slots
    assert [queues.key(slot) for slot in queues.walk(1)] == order
    assert queues.used(1) == 2 * len(POOL)
    queues.check_integrity()
