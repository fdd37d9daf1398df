"""Measured rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.rates import RateMeter

SAMPLES = st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(1e-4, 100)), min_size=1, max_size=30)


def test_nothing_measured_is_zero() -> None:
    assert RateMeter().rate == 0.0


def test_a_steady_rate_is_found_whatever_the_sizes_of_its_samples() -> None:
    meter = RateMeter()
    for seconds in (0.01, 3.0, 0.5, 40.0):
        meter.note(200 * seconds, seconds)
    assert meter.rate == pytest.approx(200)


def test_old_work_loses_half_its_weight_with_every_half_life() -> None:
    meter = RateMeter(half_life_s=10)
    meter.note(1000, 10)
    meter.note(0.001, 10)
    assert meter.rate == pytest.approx((1000 / 2) / (10 / 2 + 10), rel=1e-4)


def test_a_tiny_sample_with_a_silly_quotient_weighs_little() -> None:
    meter = RateMeter()
    meter.note(1000, 10)
    meter.note(1, 1e-6)
    assert meter.rate == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize(("amount", "seconds"), [(0, 1), (1, 0), (-5, 1), (5, -1), (0, 0)])
def test_what_can_not_be_a_measurement_is_ignored(amount: float, seconds: float) -> None:
    meter = RateMeter()
    meter.note(amount, seconds)
    assert meter.rate == 0.0
    meter.note(10, 2)
    meter.note(amount, seconds)
    assert meter.rate == pytest.approx(5)


@given(SAMPLES)
def test_the_rate_lies_between_the_slowest_and_the_fastest_sample(samples: list[tuple[float, float]]) -> None:
    meter = RateMeter()
    for amount, seconds in samples:
        meter.note(amount, seconds)
    quotients = [amount / seconds for amount, seconds in samples]
    assert min(quotients) * 0.999 <= meter.rate <= max(quotients) * 1.001


def test_a_change_shows_after_a_few_half_lives() -> None:
    meter = RateMeter(half_life_s=1)
    for _ in range(20):
        meter.note(100, 1)
    for _ in range(10):
        meter.note(10, 1)
    assert meter.rate == pytest.approx(10, rel=0.05)
