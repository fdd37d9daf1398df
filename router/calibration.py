"""How fast replicas of one kind are, learned from what their requests took.

A request's first token came after its own prompt and those before it were computed: `Observation` has both sides. Over
the last of them a line is fitted, seconds against prompts, tokens and pairs of tokens, robustly and pulled to a prior:

- *Few lengths seen*: the prior gives the shape, and the median of measured to expected seconds its scale, so that what
  can't be told apart stays in proportion.
- *Outliers* (a stall, a page fault, a queue that nobody reported) weigh in with their number, not with their size.
- *Change*: older observations fade; when the last few all miss in the same direction by far, those before go.
- *Full KV*: who waits until others end and leave their blocks says nothing of prefills, and is not counted.

Loads are learned as a factor on the prior, tier by tier, from requests that had to wait for them; decoding from load
reports. Deterministic, without a clock: time is counted in observations.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import NamedTuple

import numpy as np

from cache_store.events import Load
from router.speed import PRIOR, TIERS, UNDER_WAY, Floats, Speed

WINDOW = 64
"""Observations that a fit looks at."""
HALF_LIFE = 24.0
"""Observations after which one weighs half."""
EVERY = 6
"""Observations between two fits, once there are some."""
LOAD_WINDOW = 33
"""Loads from a tier that its factor is the median of. Those of a node share its bandwidth, and vary with it."""
CHANGED_RUN = 6
CHANGED_BY = 1.3
"""So many misses in a row by this factor and in one direction are a change of the replica, not noise."""
_BY_ONE = 4
"""Of these misses, the most that one of several replicas may have made."""
NOISE = 0.15
"""Relative deviation that is expected of an observation without a queue."""
QUEUE_NOISE = 0.5
"""Relative deviation of what is known of the queue: reports are late, and others decide meanwhile."""
_HUBER = 1.5
_LOAD_SHARE = 0.3
"""Part of a request's time that its load must be for the request to tell something about loading."""
_SHORTEST_S, _LONGEST_S = 1e-5, 1e5
"""Beyond these nothing is a measurement of a prefill."""
_ROUNDS = 4
"""Reweightings of a fit."""
_COLUMNS, _FEATURES, _SECONDS, _NOISE = 5, slice(0, 3), 3, 4
"""Of a line; see `_line`."""
FULL = 0.95
"""Part of the KV blocks beyond which a further request may wait for one that ends."""
BLOCKED_BY = 1.5
"""By this factor over what was expected, such a request counts as having waited for that."""
_FEW = 4
"""Running streams from which on their part of the KV tells what a further one needs."""
_TOLD_BY = 0.02
"""Relative change of the decode speed that makes another `Speed`."""
_LEAST = 1 / 20
"""Of a token's seconds at the prior's proportions: what a fit may leave of them."""
_SLOWEST, _FASTEST = 1e-2, 1e8
"""Tokens per second that a report is believed to within."""
_PULL = 3.0
"""The prior's own relative deviation: it gives way to a handful of observations."""


class Observation(NamedTuple):
    """A prefill that is over: what was known when it was decided, and what it took."""

    ttft_s: float
    """From the decision to the first token."""
    tokens: int
    """Prompt tokens that the replica computed."""
    cached: int
    """Prompt tokens before them, loaded ones included."""
    loaded: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Of the cached ones, those that were loaded, by tier as in `Loadable`."""
    pending: int = 0
    """Prompt tokens that were to be computed before it."""
    waiting: int = 0
    """Requests before it without a first token."""
    running: int = 0
    """Streams that decoded."""
    waited_s: float = 0.0
    """Seconds before the decision that `pending` was counted."""
    kv_used: float = 0.0
    """Part of the KV blocks in use when it was decided."""

    @property
    def crowded(self) -> bool:
        """Whether those before it and itself may not all have had KV blocks."""
        share = self.kv_used / max(self.running, _FEW)
        return self.kv_used + (self.waiting + 1) * share > FULL

    def slowed(self, factor: float) -> Observation:
        """As a replica would have made it that takes `factor` as long for everything."""
        return self._replace(ttft_s=self.ttft_s * factor, waited_s=self.waited_s * factor)


class Calibrator:
    """Of replicas that are alike, or of one. Not thread-safe."""

    def __init__(self, prior: Speed = PRIOR) -> None:
        """`prior`: what is believed until something is seen, such as the speed of other replicas of the pool."""
        self._prior = prior
        self._prefill = prior.table[:3].copy()
        self._prefill_rate = 0.0
        self._decode_scale = 1.0
        self._told_scale = 1.0
        """The decode scale that `speed` has."""
        self._load_ratios: tuple[deque[float], ...] = tuple(deque(maxlen=LOAD_WINDOW) for _ in range(TIERS))
        self._load_scales: Floats = np.ones(TIERS)
        self._lines: Floats = np.zeros((0, _COLUMNS))
        self._replicas: deque[int] = deque(maxlen=WINDOW)
        """Per line, who made it."""
        self._misses: deque[float] = deque(maxlen=CHANGED_RUN)
        self.changes = 0
        """How often what was seen before was forgotten."""
        self._unfitted = 0
        self._speed: Speed | None = prior

    @property
    def observed(self) -> int:
        """Prefills that the speed is learned from; 0 while nothing but reports was seen."""
        return len(self._lines)

    @property
    def speed(self) -> Speed:
        """As of the last observation or report; the same object until something changes."""
        if self._speed is None:
            table = self._prior.table.copy()
            table[:3] = self._prefill
            table[3:5] *= self._decode_scale
            speed = Speed(table)
            speed.load_token_s[:] *= self._load_scales
            speed.load_latency_s[:] *= self._load_scales
            self._speed, self._told_scale = speed, self._decode_scale
        return self._speed

    def observe(self, seen: Observation, replica: int = 0) -> Line | None:
        """Take over one prefill of a replica. None where it can't be a measurement, or says nothing of prefills."""
        if not _SHORTEST_S <= seen.ttft_s <= _LONGEST_S or seen.tokens < 1 or seen.waited_s < 0:
            return None
        speed = self.speed
        line_s = float(speed.queue_s(seen.pending, seen.waiting))
        queue_s = line_s - seen.waited_s
        if queue_s <= 0:
            # The line had come to its end, as far as is known. It may have been longer, which makes this less certain.
            seen, queue_s = seen._replace(pending=0, waiting=0, waited_s=0.0), 0.0
        prefill_s = float(speed.prefill_s(seen.tokens, seen.cached))
        if seen.crowded and seen.ttft_s > BLOCKED_BY * (queue_s + prefill_s):
            return None
        if any(seen.loaded) and self._observe_load(seen, queue_s, prefill_s):
            return None
        noise = math.hypot(NOISE, QUEUE_NOISE * line_s / (line_s + prefill_s))
        line = _line(seen, self._half_step_s(seen.running), noise)
        expected = float(line[_FEATURES] @ self._prefill)
        self._lines = np.concatenate((self._lines[1 - WINDOW :], line[None]))
        self._replicas.append(replica)
        self._misses.append(float(line[_SECONDS]) / max(expected, _SHORTEST_S))
        self._unfitted += 1
        if len(self._lines) <= 2 * EVERY or self._unfitted >= EVERY or self._has_changed():
            self._fit()
        return Line(line[_FEATURES], float(line[_SECONDS]), line_s > prefill_s)

    def reported(self, load: Load) -> None:
        """Take over the rates of a load report. They are averages over seconds, and of other routers' requests too."""
        if load.prefill_rate > 0 and load.prefill_rate != self._prefill_rate:
            self._prefill_rate = min(max(load.prefill_rate, _SLOWEST), _FASTEST)
            if not self.observed:
                self._prefill = self._shape()
                self._speed = None
        if load.decode_rate > 0 and load.running > 0:
            step_s = float(self._prior.decode_step_s + load.running * self._prior.decode_stream_s)
            measured_s = 1 / min(max(load.decode_rate, _SLOWEST), _FASTEST)
            self._decode_scale += 0.2 * (measured_s / step_s - self._decode_scale)
            if abs(self._decode_scale - self._told_scale) > _TOLD_BY * self._told_scale:
                self._speed = None

    def _half_step_s(self, running: int) -> float:
        speed = self.speed
        return float(speed.decode_step_s + running * speed.decode_stream_s) / 2 if running else 0.0

    def _observe_load(self, seen: Observation, queue_s: float, prefill_s: float) -> bool:
        """True when the load was most of what the request waited for."""
        speed = self.speed
        loaded = np.array(seen.loaded)
        by_tier = loaded * speed.load_token_s + (loaded > 0) * speed.load_latency_s
        expected = float(by_tier.sum())
        measured = seen.ttft_s - prefill_s
        if max(expected, measured) < max(queue_s, _LOAD_SHARE * seen.ttft_s):
            return False
        tier = int(by_tier.argmax())
        scale = float(self._load_scales[tier])
        # Not below a twentieth: what is left after a wrong guess of the prefill may be next to nothing.
        ratio = min(max(measured / expected, 0.05), 20.0) * scale
        self._load_ratios[tier].append(ratio)
        self._load_scales[tier] = np.median(self._load_ratios[tier])
        self._speed = None
        return True

    def _shape(self) -> Floats:
        """Seconds per prompt, token and pair before anything is observed: the prior's, at the rate reported."""
        shape = self._prior.table[:3].copy()
        if self._prefill_rate > 0:
            shape *= 1 / self._prefill_rate / max(shape[1], 1e-12)
        return shape

    def _has_changed(self) -> bool:
        if len(self._misses) < CHANGED_RUN or len(self._lines) <= CHANGED_RUN:
            return False
        if not (min(self._misses) > CHANGED_BY or max(self._misses) < 1 / CHANGED_BY):
            return False
        # Of several that are alike, one alone has changed itself, and not the kind.
        seen = list(self._replicas)
        ((_, most),) = Counter(seen[-CHANGED_RUN:]).most_common(1)
        return most <= _BY_ONE or len(set(seen)) == 1

    def _fit(self) -> None:
        if self._has_changed():
            self._lines = self._lines[-CHANGED_RUN:]
            self._replicas = deque(list(self._replicas)[-CHANGED_RUN:], WINDOW)
            self._misses.clear()
            self.changes += 1
        self._unfitted = 0
        self._prefill = _fitted(self._lines, self._shape())
        self._speed = None


class Line(NamedTuple):
    """What one observation says of prefills."""

    features: Floats
    """(3,) prompts, tokens and pairs of tokens that were computed."""
    seconds: float
    queued: bool
    """True where most of the time was expected to go to others' prompts."""


def _line(seen: Observation, half_step_s: float, noise: float) -> Floats:
    """One row of the regression: prompts, tokens and pairs of tokens that were computed until the first token came, the
    seconds that took, and the relative deviation that is expected of them."""
    waiting = max(seen.waiting, 1 if seen.pending else 0)
    pairs = seen.tokens * (seen.cached + seen.tokens / 2)
    if waiting:
        pairs += seen.pending * (seen.pending / waiting) / 2
    tokens = seen.tokens + seen.pending
    seconds = seen.waited_s + max(seen.ttft_s - half_step_s, seen.ttft_s / 4)
    prompts = 1.0 + max(waiting - UNDER_WAY, 0.0)
    return np.array((prompts, tokens, pairs, seconds, noise), dtype=np.float64)


def _fitted(lines: Floats, shape: Floats) -> Floats:
    """Least squares of relative errors with Huber's weights, pulled to `shape` at its best scale; none below zero."""
    features, seconds, noise = lines[:, _FEATURES], lines[:, _SECONDS], lines[:, _NOISE]
    fresh = 0.5 ** (np.arange(len(lines) - 1, -1, -1) / HALF_LIFE)
    expected = np.maximum(features @ shape, _SHORTEST_S / 100)
    prior = shape * _weighted_median(seconds / expected, fresh / noise**2)
    # A pair's prior may be zero, and a long prompt's attention may cost as much as all else of it.
    spread = _PULL * np.maximum(prior, prior[1] * np.array((20.0, 0.0, 1 / 20_000)))
    scaled, start = features * spread, prior / spread
    fit = start
    for _ in range(_ROUNDS):
        expected = np.maximum(scaled @ fit, _SHORTEST_S / 100)
        scale = noise * np.sqrt(seconds * expected)
        off = np.abs(expected - seconds) / scale
        weights = fresh * np.minimum(1.0, _HUBER / np.maximum(off, 1e-9)) / scale**2
        fit = _ridge(scaled, seconds, weights, start)
    fitted: Floats = fit * spread
    fitted[1] = max(fitted[1], _LEAST * prior[1])
    return fitted


def _ridge(features: Floats, seconds: Floats, weights: Floats, prior: Floats) -> Floats:
    """Weighted least squares, pulled to the prior. What would be negative is held at zero, and the rest fitted anew."""
    weighted = features.T * weights
    left = weighted @ features + np.eye(len(prior))
    right = weighted @ seconds + prior
    try:
        fit = np.linalg.solve(left, right)
        free = fit > 0
        while not (fit >= 0).all() and free.any():
            fit = np.zeros(len(prior))
            fit[free] = np.linalg.solve(left[np.ix_(free, free)], right[free])
            free &= fit > 0
    except np.linalg.LinAlgError:
        # Weights of sizes so different that nothing can be told apart.
        return prior
    positive: Floats = np.maximum(fit, 0.0)
    return positive


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    upto = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(upto, upto[-1] / 2)])
