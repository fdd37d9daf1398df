"""Speeds of a router's replicas: learned together where they are alike, and apart where one is not."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.events import Load
from router.calibration import Observation
from router.known_speeds import FORGOTTEN_S, KnownSpeeds
from router.speed import PRIOR, Speed

GPU = Speed.of(prefill_overhead_s=0.012, prefill_token_s=1 / 30_000, prefill_pair_s=4e-10)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Machines:
    """Some replicas of one kind, each a factor slower than `GPU`, and what a router learns of them."""

    def __init__(self, *slower: float, seed: int = 0, noise: float = 0.15) -> None:
        self.slower = list(slower)
        self.clock = Clock()
        self.speeds = KnownSpeeds(self.clock)
        self.speeds.grow(len(slower))
        for row in range(len(slower)):
            self.speeds.put(row, "kind")
        self._draw, self._noise = random.Random(seed), noise

    def serve(self, row: int) -> float:
        """One request. Returns the relative error of what was predicted of it."""
        tokens = round(self._draw.lognormvariate(6.5, 1.0)) + 1
        took = float(GPU.prefill_s(tokens, 0)) * self.slower[row]
        took *= math.exp(self._draw.gauss(0, self._noise))
        error = abs(self.expected_s(row, tokens) - took) / took
        self.clock.now += 0.1
        self.speeds.observe(row, Observation(took, tokens, 0))
        self.speeds.check_integrity()
        return error

    def serve_all(self, requests: int) -> list[float]:
        return [self.serve(self._draw.randrange(len(self.slower))) for _ in range(requests)]

    def expected_s(self, row: int, tokens: int = 1000) -> float:
        return float(Speed(self.speeds.table[:, row]).prefill_s(tokens, 0))

    def paces(self) -> list[float]:
        """Relative to the first one."""
        return [self.expected_s(row) / self.expected_s(0) for row in range(len(self.slower))]


@pytest.mark.parametrize("seed", range(5))
def test_equal_machines_are_believed_to_be_equal(seed: int) -> None:
    machines = Machines(1, 1, 1, 1, seed=seed)
    for _ in range(300):
        machines.serve_all(1)
        assert machines.paces() == [1, 1, 1, 1]


def test_machines_that_differ_within_a_quarter_count_as_equal() -> None:
    machines = Machines(0.93, 1.0, 1.07, noise=0.03)
    machines.serve_all(300)
    assert machines.paces() == [1, 1, 1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slower", [0.4, 2.0, 4.0])
def test_one_that_is_slower_or_faster_than_its_kind_is_known_by_its_own(slower: float, seed: int) -> None:
    machines = Machines(1, 1, 1, slower, seed=seed)
    machines.serve_all(200)
    assert machines.paces() == pytest.approx([1, 1, 1, slower], rel=0.35)
    assert statistics.median(machines.serve_all(200)) <= 0.25


@pytest.mark.parametrize("seed", range(5))
def test_two_of_unlike_speed_are_told_apart(seed: int) -> None:
    machines = Machines(1, 3, seed=seed)
    machines.serve_all(200)
    errors = machines.serve_all(200)
    assert statistics.median(errors) <= 0.25
    assert np.quantile(errors, 0.9) <= 0.6


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_one_that_changes_is_followed_and_the_others_are_left_alone(factor: float, seed: int) -> None:
    machines = Machines(1, 1, 1, 1, seed=seed)
    machines.serve_all(200)
    before = machines.expected_s(0)
    machines.slower[3] = factor
    for _ in range(24):
        machines.serve(3)
    assert machines.expected_s(3) / before == pytest.approx(factor, rel=0.35)
    assert machines.expected_s(0) / before == pytest.approx(1, rel=0.25)


@pytest.mark.parametrize("factor", [1 / 3, 3.0])
def test_a_change_of_all_is_known_of_all_by_the_requests_of_some(factor: float) -> None:
    machines = Machines(1, 1, 1, 1)
    machines.serve_all(200)
    before = machines.expected_s(3)
    machines.slower = [factor] * 4
    for number in range(36):
        machines.serve(number % 2)
    assert machines.expected_s(3) / before == pytest.approx(factor, rel=0.35)


def test_what_one_alone_deviates_by_is_forgotten_when_nobody_asks_it() -> None:
    machines = Machines(1, 1, 4)
    machines.serve_all(200)
    assert machines.paces()[2] > 2
    machines.clock.now += FORGOTTEN_S + 1
    assert machines.paces() == [1, 1, 1]
    machines.speeds.check_integrity()


def test_one_replica_alone_is_its_kind() -> None:
    machines = Machines(5)
    machines.serve_all(100)
    machines.speeds.grow(2)
    machines.speeds.put(1, "kind")
    assert machines.speeds.table[:, 1] == pytest.approx(machines.speeds.table[:, 0]), (
        "and the next is like it"
    )
    assert machines.expected_s(0) == pytest.approx(5 * float(GPU.prefill_s(1000, 0)), rel=0.2)


def test_a_replica_that_becomes_another_kind_is_known_as_that() -> None:
    machines = Machines(1, 1)
    machines.serve_all(50)
    machines.speeds.put(0, "another")
    assert machines.speeds.table[:, 0] == pytest.approx(PRIOR.table)
    machines.speeds.put(0, "kind")
    assert machines.speeds.table[:, 0] == pytest.approx(machines.speeds.table[:, 1])


def report(draw: random.Random) -> Load:
    return Load(0, draw.randrange(9), 0, draw.random(), draw.uniform(0, 9e4), draw.uniform(0, 200))


@settings(max_examples=40, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_tables_are_sound_whatever_comes_and_goes(draw: random.Random) -> None:
    clock, rows = Clock(), 6
    speeds, here = KnownSpeeds(clock), set[int]()
    speeds.grow(rows)
    for _ in range(120):
        row = draw.randrange(rows)
        match draw.randrange(8):
            case 0:
                speeds.put(row, draw.choice("ab"))
                here.add(row)
            case 1:
                speeds.drop(row)
                here.discard(row)
            case 2 if row in here:
                speeds.reported(row, report(draw))
            case _ if row in here:
                speeds.observe(
                    row, Observation(draw.uniform(0, 10), draw.randrange(9000), draw.randrange(9000))
                )
        clock.now += draw.choice((0.01, 0.01, 0.01, FORGOTTEN_S))
        speeds.check_integrity()
        assert all(speeds.table[:, [*here]].sum(axis=0) > 0)
