"""A tier that does not work is switched off, once and loudly, and found again when it works."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.tier_health import PartMissing, TierHealth, TierUnavailable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


FULL = OSError(errno.ENOSPC, "No space left on device")
BAD = OSError(errno.EIO, "Input/output error")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> TierHealth:
    return TierHealth("writes to disk /x", limit_s=2.0, probe_s=5.0, failures=3, clock=clock)


def run(health: TierHealth, result: BaseException | None = None, even_off: bool = False) -> bool:
    """One operation; whether it was let through and worked."""
    try:
        with health.operation(even_off):
            if result is not None:
                raise result
    except TierUnavailable:
        return False
    return True


def taking(health: TierHealth, clock: Clock, seconds: float) -> None:
    with health.operation():
        clock.now += seconds


def test_it_is_on_while_operations_succeed(health: TierHealth) -> None:
    assert all(run(health) for _ in range(10))
    assert health.works()
    assert (health.failed, health.slow, health.switched_off) == (0, 0, 0)


def test_failures_in_a_row_switch_it_off(health: TierHealth) -> None:
    for _ in range(2):
        assert not run(health, BAD)
        assert health.works()
    assert not run(health, BAD)
    assert not health.works()
    assert (health.failed, health.switched_off) == (3, 1)


def test_a_success_between_failures_begins_a_new_row(health: TierHealth) -> None:
    for _ in range(5):
        run(health, BAD)
        run(health, BAD)
        run(health)
    assert health.works()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ENOENT])
def test_one_hopeless_failure_is_enough(health: TierHealth, code: int) -> None:
    run(health, OSError(code, "no"))
    assert not health.works()


def test_slow_operations_keep_their_result_and_switch_it_off(health: TierHealth, clock: Clock) -> None:
    for _ in range(3):
        taking(health, clock, 2.1)
    assert not health.works()
    assert (health.slow, health.failed) == (3, 0)


def test_operations_at_the_limit_are_not_slow(health: TierHealth, clock: Clock) -> None:
    for _ in range(10):
        taking(health, clock, 2.0)
    assert health.works()


def test_an_operation_that_hangs_switches_it_off_while_it_hangs(health: TierHealth, clock: Clock) -> None:
    with health.operation():
        clock.now += 2.5
        assert not health.works()
        clock.now += 60
        assert not health.due()
        assert not run(health)
    clock.now += 5
    assert run(health)
    assert health.works()


@pytest.mark.parametrize("result", [PartMissing("x"), ValueError("x"), KeyboardInterrupt()])
def test_what_is_no_failure_of_the_storage_passes_through(health: TierHealth, result: BaseException) -> None:
    for _ in range(5):
        with pytest.raises(type(result)), health.operation():
            raise result
    assert health.works()
    assert health.failed == 0


def test_while_off_nothing_runs_and_the_reason_is_told(health: TierHealth) -> None:
    run(health, FULL)
    with (
        pytest.raises(TierUnavailable, match=r"writes to disk /x are off: .*No space left"),
        health.operation(),
    ):
        pytest.fail("let through")


def test_after_the_probe_period_one_operation_tries_it_out(health: TierHealth, clock: Clock) -> None:
    run(health, FULL)
    clock.now += 4.9
    assert not health.due()
    clock.now += 0.2
    assert health.due()
    with health.operation():
        assert not health.due()
        assert not run(health)
    assert health.works()
    assert not health.due()


def test_a_failed_probe_waits_for_the_next_period(health: TierHealth, clock: Clock) -> None:
    run(health, FULL)
    for _ in range(4):
        clock.now += 5
        assert not run(health, BAD)
        assert not health.due()
    clock.now += 5
    assert run(health)
    assert (health.works(), health.switched_off) == (True, 1)


def test_a_slow_probe_does_not_switch_it_on(health: TierHealth, clock: Clock) -> None:
    run(health, FULL)
    clock.now += 5
    taking(health, clock, 3)
    assert not health.works()


def test_an_old_operation_that_ends_well_does_not_switch_it_on(health: TierHealth) -> None:
    with health.operation():
        run(health, FULL)
    assert not health.works()


def test_what_runs_even_when_off_is_neither_refused_nor_a_probe(health: TierHealth, clock: Clock) -> None:
    run(health, FULL)
    clock.now += 5
    assert run(health, even_off=True)
    assert not health.works()
    assert health.due()


def test_what_runs_even_when_off_ends_no_row_of_failures(health: TierHealth) -> None:
    for _ in range(3):
        run(health, BAD)
        run(health, even_off=True)
    assert not health.works()


def test_what_runs_even_when_off_does_not_join_one_that_hangs(health: TierHealth, clock: Clock) -> None:
    with health.operation():
        clock.now += 3
        assert not run(health, even_off=True)


def test_each_change_is_one_line_in_the_log(health: TierHealth, clock: Clock, tier_log: list[str]) -> None:
    for _ in range(20):
        run(health, FULL)
    assert len(tier_log) == 1
    assert "writes to disk /x are off" in tier_log[0]
    clock.now += 5
    for _ in range(20):
        run(health)
    assert tier_log[1:] == ["writes to disk /x are on again, after 5.0 s"]


def test_one_that_flaps_is_tried_ever_less_often_and_no_less_than_once_a_minute(
    health: TierHealth, clock: Clock
) -> None:
    waits = []
    for _ in range(8):
        run(health, FULL)
        began = clock.now
        while not health.due():
            clock.now += 1
        run(health)
        waits.append(clock.now - began)
    assert waits == [5, 10, 20, 40, 60, 60, 60, 60]
    clock.now += 1000
    run(health, FULL)
    clock.now += 5
    assert health.due()


@given(st.lists(st.sampled_from(["good", "bad", "full", "slow", "wait", "even off"]), max_size=60))
def test_any_sequence_leaves_it_consistent(steps: list[str]) -> None:
    clock = Clock()
    health = TierHealth("x", limit_s=2.0, probe_s=5.0, clock=clock)
    does: dict[str, Callable[[], object]] = {
        "good": lambda: run(health),
        "bad": lambda: run(health, BAD),
        "full": lambda: run(health, FULL),
        "slow": lambda: taking(health, clock, 3) if health.works() else None,
        "wait": lambda: setattr(clock, "now", clock.now + 70),
        "even off": lambda: run(health, even_off=True),
    }
    for step in steps:
        does[step]()
        health.check_integrity()
    clock.now += 70
    assert run(health)
    assert health.works()


def test_threads_that_fail_at_once_switch_it_off_once() -> None:
    health = TierHealth("x", limit_s=60.0, probe_s=1000.0)
    begin = threading.Barrier(8)

    def fail(seed: int) -> None:
        begin.wait(10)
        chance = random.Random(seed)
        for _ in range(200):
            run(health, chance.choice([BAD, FULL, None]))

    threads = [threading.Thread(target=fail, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not health.works()
    assert health.switched_off == 1
    health.check_integrity()
