"""Admission to a tier, and the memory for keys that it has."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.admission import Always, SecondTouch, admission_from
from cache_store.events import ChunkKey
from cache_store.recent_keys import RecentKeys


def make_keys(count: int, seed: int = 0) -> list[ChunkKey]:
    source = random.Random(seed)
    return [ChunkKey(source.randbytes(32)) for _ in range(count)]


POOL = make_keys(8)
NAMES = ("always", "second_touch")


@pytest.mark.parametrize("name", NAMES)
@given(asked=st.lists(st.sampled_from(POOL), max_size=40))
def test_once_admitted_a_chunk_is_admitted_again_while_it_is_asked_for(
    name: str, asked: list[ChunkKey]
) -> None:
    admission = admission_from(name)
    admitted = set()
    for key in asked:
        answer = admission.admit(key)
        assert answer or key not in admitted
        admitted |= {key} if answer else set()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_asked_for_often_is_admitted_however_much_is_asked_for_once(name: str) -> None:
    admission = admission_from(name)
    answers = []
    for key in make_keys(1_000, seed=1):
        admission.admit(key)
        answers.append(admission.admit(POOL[0]))
    assert all(answers[1:])


def test_an_admission_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError, match="never"):
        admission_from("never")


def test_always_admits_everything() -> None:
    assert all(Always().admit(key) for key in make_keys(100))


@given(asked=st.lists(st.sampled_from(POOL), max_size=40))
def test_second_touch_admits_what_it_was_asked_for_before(asked: list[ChunkKey]) -> None:
    admission, seen = SecondTouch(64), set[ChunkKey]()
    for key in asked:
        assert admission.admit(key) == (key in seen)
        seen.add(key)


def test_second_touch_forgets_what_comes_up_again_too_late() -> None:
    admission = SecondTouch(1_000)
    early, late = make_keys(100, seed=1), make_keys(100, seed=2)
    for key in early + make_keys(5_000, seed=3) + late + make_keys(200, seed=4):
        assert not admission.admit(key)
    assert sum(admission.admit(key) for key in late) > 90
    assert sum(admission.admit(key) for key in early) < 10


@given(capacity=st.integers(1, 40), keys=st.lists(st.sampled_from(make_keys(60, seed=5)), max_size=200))
def test_recent_keys_hold_the_last_ones_and_no_more_than_fit(capacity: int, keys: list[ChunkKey]) -> None:
    recent, seen = RecentKeys(capacity), set[ChunkKey]()
    assert capacity <= recent.capacity < capacity + 8
    for key in keys:
        known = key in recent
        assert not known or key in seen
        assert recent.add(key) == known
        assert key in recent
        seen.add(key)
        assert sum(key in recent for key in seen) <= recent.capacity
    for key in dict.fromkeys(reversed(keys)):
        recent.discard(key)
        assert key not in recent
    assert not any(key in recent for key in seen)


def test_a_bucket_forgets_its_oldest_first() -> None:
    recent, keys = RecentKeys(8), make_keys(9, seed=6)
    for key in keys[:8]:
        recent.add(key)
    recent.add(keys[0])
    recent.add(keys[8])
    assert [key in recent for key in keys] == [True, False] + [True] * 7


def test_recent_keys_that_grow_forget_nothing_and_keep_their_order() -> None:
    even = [key for key in make_keys(50, seed=7) if key[0] % 2 == 0][:9]
    recent = RecentKeys(8)
    for key in even[:8]:
        recent.add(key)
    recent.double()
    assert recent.capacity == 16
    assert all(key in recent for key in even[:8])
    # There are two buckets now, and even fingerprints go to the first: it was full.
    recent.add(even[8])
    assert [key in recent for key in even] == [False] + [True] * 8


def test_a_key_is_remembered_in_eight_bytes() -> None:
    keys = make_keys(100_000)
    gc.collect()
    tracemalloc.start()
    try:
        recent = RecentKeys(len(keys))
        for key in keys:
            recent.add(key)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 9 * len(keys)
    assert sum(key in recent for key in keys) > 0.8 * len(keys)
