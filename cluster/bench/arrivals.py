"""When the sessions of an open loop start."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from cluster.bench.config import Arrival
from cluster.bench.workloads import Session


class Arriving(NamedTuple):
    at_s: float
    """From the start of the run, never less than the one before."""
    session: Session


def arriving(
    sessions: Iterable[Session], arrival: Arrival, seed: int, requests: int | None
) -> Iterator[Arriving]:
    """Give every session its time. `requests` is how many requests there are, where that is known.

    A session of several turns takes the time of as many requests, so that the rate is one of requests.
    """
    if arrival.kind == "trace":
        return (Arriving(session.start_s or 0.0, session) for session in sessions)
    if arrival.rate is None:
        raise ValueError(f"{arrival.kind} arrivals have no times of their own")
    source = random.Random(f"{seed}/arrivals")
    if requests is None:
        gaps = (_gap(source, arrival.rate, arrival.burstiness) for _ in itertools.count())
        return _spread(iter(sessions), gaps)
    bounded = list(sessions)
    return _spread(iter(bounded), iter(request_gaps(source, arrival.rate, arrival.burstiness, requests)))


def request_gaps(source: random.Random, rate: float, burstiness: float, count: int) -> list[float]:
    """Seconds before each request: gamma with shape `burstiness`, and as in vLLM scaled to end at `count / rate`."""
    gaps = [_gap(source, rate, burstiness) for _ in range(count)]
    total = sum(gaps)
    scale = count / rate / total if total > 0 else 1.0
    return [gap * scale for gap in gaps]


def _gap(source: random.Random, rate: float, burstiness: float) -> float:
    if math.isinf(burstiness) or math.isinf(rate):
        return 1 / rate
    return source.gammavariate(burstiness, 1 / (rate * burstiness))


def _spread(sessions: Iterator[Session], gaps: Iterator[float]) -> Iterator[Arriving]:
    now, further_turns = 0.0, 0
    for session in sessions:
        now += sum(itertools.islice(gaps, 1 + further_turns))
        further_turns = len(session.turns) - 1
        yield Arriving(now, session)
