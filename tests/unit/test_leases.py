"""Leases hold chunks until released or run out, pins until they are taken away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.events import ChunkKey
from cache_store.leases import MAX_LEASE_S, Leases


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


A, B, C = (key(number) for number in range(3))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> Leases:
    return Leases(clock)


def test_a_chunk_is_held_until_its_last_lease_is_released(leases: Leases) -> None:
    first, second = leases.take([A, B], 60), leases.take([B, C], 60)
    assert first != second
    assert leases.release(first)
    assert [leases.held(key) for key in (A, B, C)] == [False, True, True]
    assert leases.release(second)
    assert leases.leased == len(leases) == 0


def test_a_lease_ends_by_itself(leases: Leases, clock: Clock) -> None:
    leases.take([A], 10)
    leases.take([B], 20)
    clock.now += 10
    assert leases.expire() == 1
    assert not leases.held(A)
    assert leases.held(B)


def test_releasing_what_has_ended_is_nothing(leases: Leases, clock: Clock) -> None:
    lease, other = leases.take([A], 10), leases.take([A], 30)
    clock.now += 20
    leases.expire()
    assert not leases.release(lease)
    assert leases.held(A)
    assert leases.release(other)
    assert not leases.release(other)


def test_nothing_leased_is_no_lease(leases: Leases) -> None:
    assert leases.take([], 60) == 0
    assert not leases.release(0)


@pytest.mark.parametrize("seconds", [float("inf"), 1e30])
def test_no_lease_is_longer_than_the_limit(leases: Leases, clock: Clock, seconds: float) -> None:
    leases.take([A], seconds)
    clock.now += MAX_LEASE_S
    leases.expire()
    assert not leases.held(A)


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, 0.0])
def test_a_lease_of_no_time_ends_at_once(leases: Leases, seconds: float) -> None:
    leases.take([A], seconds)
    assert leases.expire() == 1


def test_a_key_asked_for_twice_in_one_lease_is_held_by_it(leases: Leases) -> None:
    lease = leases.take([A, A], 60)
    leases.release(lease)
    assert not leases.held(A)


def test_pinning_twice_is_pinning_once(leases: Leases) -> None:
    leases.pin(A)
    leases.pin(A)
    assert leases.unpin(A)
    assert not leases.held(A)
    assert not leases.unpin(A)


def test_a_pin_outlives_leases(leases: Leases, clock: Clock) -> None:
    leases.pin(A)
    leases.release(leases.take([A], 10))
    clock.now += 1000
    leases.expire()
    assert leases.held(A)
    assert (leases.is_pinned(A), leases.is_leased(A), leases.pins) == (True, False, 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "release", "wait", "pin", "unpin"]), st.integers(0, 5), st.integers(0, 9)
        ),
        max_size=60,
    )
)
def test_held_is_what_a_list_of_all_leases_says(steps: list[tuple[str, int, int]]) -> None:
    clock = Clock()
    leases = Leases(clock)
    model: dict[int, tuple[set[ChunkKey], float]] = {}
    pins: set[ChunkKey] = set()
    for step, n, m in steps:
        if step == "take":
            keys = [key(i) for i in range(n, n + m % 3)]
            lease = leases.take(keys, m)
            if keys:
                model[lease] = (set(keys), clock.now + m)
        elif step == "release" and model:
            chosen = sorted(model)[n % len(model)]
            assert leases.release(chosen)
            del model[chosen]
        elif step == "wait":
            clock.now += m
            ended = [lease for lease, (_, until) in model.items() if until <= clock.now]
            assert leases.expire() == len(ended)
            for lease in ended:
                del model[lease]
        elif step == "pin":
            leases.pin(key(n))
            pins.add(key(n))
        elif step == "unpin":
            assert leases.unpin(key(n)) == (key(n) in pins)
            pins.discard(key(n))
        leases.check_integrity()
        held = pins.union(*(keys for keys, _ in model.values()))
        assert {key(i) for i in range(10) if leases.held(key(i))} == held
