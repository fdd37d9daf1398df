"""The calibrator: what a router believes of a replica's speed follows what the replica does."""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.events import Load
from router.calibration import Calibrator, Observation
from router.speed import PRIOR, Speed

Draw = random.Random


class Engine:
    """One server that prefills in order of arrival, and what a router knows of it: who is in line at once, and how far
    the first in line has come `late_s` later. `hidden` is what the router is not given.
    """

    def __init__(self, hidden: Speed, noise: float, draw: Draw, late_s: float = 0.0) -> None:
        self.hidden = hidden
        self._noise = noise
        self._draw = draw
        self._late_s = late_s
        self._free_at = 0.0
        self._queue: deque[tuple[float, float, int]] = deque()

    def serve(self, now: float, tokens: int, cached: int) -> Observation:
        seen_at = now - self._late_s
        while self._queue and self._queue[0][1] <= now:
            self._queue.popleft()
        pending = 0.0
        for began, ends, work in self._queue:
            pending += work * min(1.0, (ends - seen_at) / max(ends - began, 1e-9))
        factor = math.exp(self._draw.gauss(0.0, self._noise))
        began = max(now, self._free_at)
        self._free_at = began + float(self.hidden.prefill_s(tokens, cached)) * factor
        observed = Observation(
            self._free_at - now, tokens, cached, pending=round(pending), waiting=len(self._queue)
        )
        self._queue.append((began, self._free_at, tokens))
        return observed


def predicted(speed: Speed, seen: Observation) -> float:
    return float(speed.queue_s(seen.pending, seen.waiting) + speed.prefill_s(seen.tokens, seen.cached))


def errors(
    engine: Engine,
    calibrator: Calibrator,
    requests: int,
    draw: Draw,
    load: float,
    lengths: Callable[[], tuple[int, int]],
    change: Callable[[int], Speed | None] = lambda number: None,
    skip: int = 10,
) -> list[float]:
    """Relative errors of what was predicted before each request, after the first few."""
    found, now = [], 0.0
    for number in range(requests):
        engine.hidden = change(number) or engine.hidden
        tokens, cached = lengths()
        now += draw.expovariate(load / float(engine.hidden.prefill_s(tokens, cached)))
        seen = engine.serve(now, tokens, cached)
        if number >= skip:
            found.append(abs(predicted(calibrator.speed, seen) - seen.ttft_s) / seen.ttft_s)
        calibrator.observe(seen)
    return found


def mixed(draw: Draw) -> tuple[int, int]:
    """From short follow-ups to long new prompts."""
    return round(draw.lognormvariate(6.5, 1.0)) + 1, 256 * draw.randint(0, 20)


CPU = Speed.of(prefill_overhead_s=0.06, prefill_token_s=1 / 450, prefill_pair_s=2e-7)
GPU = Speed.of(prefill_overhead_s=0.012, prefill_token_s=1 / 30_000, prefill_pair_s=4e-10)
SIM = Speed.of(prefill_overhead_s=0.002, prefill_token_s=1 / 20_000)


@pytest.mark.parametrize("hidden", [CPU, GPU, SIM], ids=["cpu", "gpu", "sim"])
@pytest.mark.parametrize("load", [0.3, 0.7])
@pytest.mark.parametrize("seed", range(3))
def test_predictions_meet_what_is_measured_on_engines_of_unknown_speed(
    hidden: Speed, load: float, seed: int
) -> None:
    draw = Draw(seed)
    found = errors(
        Engine(hidden, 0.15, draw, late_s=0.05), Calibrator(), 300, draw, load, lambda: mixed(draw)
    )
    assert statistics.median(found) <= 0.25
    assert np.quantile(found, 0.9) <= 0.60


@pytest.mark.parametrize("factor", [0.33, 0.5, 2.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_replica_that_changes_its_speed_is_followed(factor: float, seed: int) -> None:
    draw = Draw(seed)
    changed = Speed(GPU.table * factor)
    found = errors(
        Engine(GPU, 0.15, draw, late_s=0.05),
        Calibrator(),
        400,
        draw,
        0.5,
        lambda: mixed(draw),
        change=lambda number: changed if number == 200 else None,
    )
    assert statistics.median(found) <= 0.25
    assert np.quantile(found, 0.9) <= 0.60
    assert statistics.median(found[200:]) <= 0.25, "and soon after the change"


def test_parts_are_told_apart_where_the_requests_show_them() -> None:
    draw = Draw(1)
    calibrator = Calibrator()
    errors(Engine(CPU, 0.05, draw), calibrator, 200, draw, 0.3, lambda: (draw.randint(8, 8000), 0))
    speed = calibrator.speed
    assert float(speed.prefill_token_s) == pytest.approx(1 / 450, rel=0.15)
    assert float(speed.prefill_s(4000, 0)) == pytest.approx(float(CPU.prefill_s(4000, 0)), rel=0.1)
    assert float(speed.prefill_s(16, 0)) == pytest.approx(float(CPU.prefill_s(16, 0)), rel=0.3)


def test_one_length_alone_keeps_the_priors_proportions() -> None:
    """What can't be told apart scales together, so that other lengths are not predicted from nothing."""
    calibrator = Calibrator()
    for _ in range(50):
        calibrator.observe(Observation(float(PRIOR.prefill_s(1000, 0)) * 8, 1000, 0))
    assert float(calibrator.speed.prefill_s(1000, 0)) == pytest.approx(
        8 * float(PRIOR.prefill_s(1000, 0)), rel=0.02
    )
    assert float(calibrator.speed.prefill_s(4000, 0)) == pytest.approx(
        8 * float(PRIOR.prefill_s(4000, 0)), rel=0.25
    )


def test_waits_for_kv_blocks_are_not_learned_as_prefills() -> None:
    """From a moment on every request waits for seconds until a stream ends; a prefill still takes what it took."""
    draw = Draw(5)
    calibrator = Calibrator()
    for number in range(300):
        tokens = draw.randint(500, 4000)
        full = number >= 100
        calibrator.observe(
            Observation(
                float(GPU.prefill_s(tokens, 0)) + (draw.uniform(2.0, 4.0) if full else 0.0),
                tokens,
                0,
                running=20,
                kv_used=0.97 if full else 0.6,
            )
        )
        if number == 99:
            before = calibrator.speed.table
    assert (calibrator.speed.table == before).all()


def test_a_replica_that_is_full_and_fast_is_still_learned_from() -> None:
    calibrator = Calibrator()
    for number in range(60):
        tokens = 500 + 50 * number
        calibrator.observe(Observation(float(GPU.prefill_s(tokens, 0)), tokens, 0, running=20, kv_used=0.97))
    assert float(calibrator.speed.prefill_s(2000, 0)) == pytest.approx(float(GPU.prefill_s(2000, 0)), rel=0.1)


@pytest.mark.parametrize("stall_s", [1.0, 30.0, 1000.0])
def test_a_stall_now_and_then_changes_little(stall_s: float) -> None:
    draw = Draw(4)
    calibrator = Calibrator()
    for number in range(200):
        tokens = draw.randint(100, 4000)
        stalled = stall_s if number % 9 == 5 else 0.0
        calibrator.observe(Observation(float(GPU.prefill_s(tokens, 0)) + stalled, tokens, 0))
    for tokens in (100, 1000, 4000):
        assert float(calibrator.speed.prefill_s(tokens, 0)) == pytest.approx(
            float(GPU.prefill_s(tokens, 0)), rel=0.25
        )


def test_a_reported_rate_stands_in_until_something_is_observed() -> None:
    calibrator = Calibrator()
    calibrator.reported(load(prefill_rate=500.0))
    assert float(calibrator.speed.prefill_token_s) == pytest.approx(1 / 500)
    calibrator.reported(load(prefill_rate=0.0))
    assert float(calibrator.speed.prefill_token_s) == pytest.approx(1 / 500), "0 is no report"


def test_decoding_is_learned_from_reports() -> None:
    calibrator = Calibrator()
    for _ in range(50):
        calibrator.reported(load(decode_rate=20.0, running=4))
    speed = calibrator.speed
    assert float(speed.decode_step_s + 4 * speed.decode_stream_s) == pytest.approx(1 / 20, rel=0.01)
    calibrator.reported(load(decode_rate=1000.0, running=0))
    assert float(speed.decode_step_s + 4 * speed.decode_stream_s) == pytest.approx(1 / 20, rel=0.01)


@pytest.mark.parametrize("tier", range(4))
@pytest.mark.parametrize("factor", [0.2, 1.0, 8.0])
def test_loads_are_learned_tier_by_tier_from_requests_that_waited_for_them(tier: int, factor: float) -> None:
    draw = Draw(tier)
    calibrator = Calibrator(GPU_WITH_TIERS)
    for _ in range(60):
        tokens, loaded = draw.randint(64, 512), [0, 0, 0, 0]
        loaded[tier] = 256 * draw.randint(8, 64)
        expected = loaded[tier] * PRIOR.load_token_s[tier] + PRIOR.load_latency_s[tier]
        prefill = float(GPU_WITH_TIERS.prefill_s(tokens, sum(loaded)))
        took = (prefill + float(expected) * factor) * math.exp(draw.gauss(0, 0.1))
        calibrator.observe(
            Observation(took, tokens, sum(loaded), (loaded[0], loaded[1], loaded[2], loaded[3]))
        )
    scale = calibrator.speed.load_token_s / PRIOR.load_token_s
    assert scale[tier] == pytest.approx(factor, rel=0.3)
    assert all(scale[other] == 1.0 for other in range(4) if other != tier), "the others stay as believed"


GPU_WITH_TIERS = Speed.of(
    prefill_overhead_s=0.002,
    prefill_token_s=1 / 60_000,
    load_token_s=PRIOR.load_token_s,
    load_latency_s=PRIOR.load_latency_s,
)


def load(prefill_rate: float = 0.0, decode_rate: float = 0.0, running: int = 0) -> Load:
    return Load(
        waiting=0,
        running=running,
        prefill_tokens=0,
        kv_used=0.0,
        prefill_rate=prefill_rate,
        decode_rate=decode_rate,
    )


observations = st.builds(
    Observation,
    ttft_s=st.floats(-1, 1e6),
    tokens=st.integers(0, 200_000),
    cached=st.integers(0, 200_000),
    loaded=st.tuples(*[st.integers(0, 100_000)] * 4),
    pending=st.integers(0, 1_000_000),
    waiting=st.integers(0, 300),
    running=st.integers(0, 300),
    waited_s=st.floats(-1, 100),
    kv_used=st.floats(0, 1),
)


@settings(max_examples=40, deadline=None)
@given(seen=st.lists(observations, max_size=40), rates=st.lists(st.floats(0, 1e6), max_size=10))
def test_whatever_comes_the_speed_stays_finite_and_positive(
    seen: list[Observation], rates: list[float]
) -> None:
    calibrator = Calibrator()
    for rate in rates:
        calibrator.reported(load(prefill_rate=rate, decode_rate=rate, running=3))
    for each in seen:
        calibrator.observe(each)
        table = calibrator.speed.table
        assert np.isfinite(table).all()
        assert (table >= 0).all()
        assert float(calibrator.speed.prefill_s(1000, 0)) > 0


def test_the_speed_is_the_same_object_until_something_is_seen() -> None:
    calibrator = Calibrator()
    assert calibrator.speed is calibrator.speed
    before = calibrator.speed
    calibrator.observe(Observation(1.0, 100, 0))
    assert calibrator.speed is not before
