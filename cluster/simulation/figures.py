"""The figures of a summary as a person reads them, for terminal and page alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cluster.bench.figures import number
from cluster.simulation.records import SOURCES
from cluster.simulation.sizes import size_text
from cluster.simulation.summary import Spread, Summary


class Row(NamedTuple):
    name: str
    texts: list[str]
    """One per summary."""
    best: set[int]
    """Which are best; empty where there is nothing to choose between."""


class _Kind(NamedTuple):
    name: str
    of: Callable[[Summary], float | None]
    text: Callable[[float], str]
    better: int = 0
    """1: more is better; -1: less; 0: neither."""
    hidden: float | None = None
    """The row is left out where every summary has this value."""


def rows(summaries: Sequence[Summary]) -> list[Row]:
    """All figures, a text for each summary."""
    found = []
    for kind in _kinds(summaries):
        values = [kind.of(each) for each in summaries]
        if all(value is None or value == kind.hidden for value in values):
            continue
        texts = ["-" if value is None else kind.text(value) for value in values]
        found.append(Row(kind.name, texts, _best(values, kind.better)))
    return found


def _kinds(summaries: Sequence[Summary]) -> list[_Kind]:
    hits = [
        _Kind(f"  from {source}", lambda each, source=source: each.hits[source], percent, hidden=0.0)  # type: ignore[misc]
        for source in SOURCES
    ]
    moved = [
        _Kind(f"moved: {name}", lambda each, name=name: float(each.moved_bytes[name]), size_text, hidden=0.0)  # type: ignore[misc]
        for name in (summaries[0].moved_bytes if summaries else ())
    ]
    return [
        _Kind("hit ratio", lambda each: each.hit, percent, 1),
        *hits,
        _Kind("  with an endless cache", lambda each: each.ceiling, percent),
        *_latencies("TTFT", lambda each: each.ttft),
        *_latencies("ITL", lambda each: each.itl),
        *_latencies("whole answer", lambda each: each.e2e),
        _Kind("busiest/mean, p50", lambda each: each.balance_p50, number, -1),
        _Kind("busiest/mean, p99", lambda each: each.balance_p99, number, -1),
        _Kind("prediction off by, p50", lambda each: each.prediction_p50, percent, -1),
        _Kind("prediction off by, p90", lambda each: each.prediction_p90, percent, -1),
        *moved,
        _Kind("output", lambda each: each.output_tokens_per_s, lambda value: f"{number(value)} tok/s", 1),
        _Kind("GPU-seconds", lambda each: each.gpu_seconds, number, -1),
        _Kind("most replicas", lambda each: each.most_replicas, number),
        _Kind("simulated", lambda each: each.duration_s, lambda value: f"{number(value)} s"),
        _Kind("answered", lambda each: each.answered, number),
        _Kind("retried elsewhere", lambda each: each.retried, number, hidden=0.0),
        _Kind("broken off", lambda each: each.broken, number, -1, hidden=0.0),
        _Kind("refused", lambda each: each.refused, number, -1, hidden=0.0),
    ]


def _latencies(name: str, of: Callable[[Summary], Spread]) -> list[_Kind]:
    return [
        _Kind(f"{name}, mean", lambda each: of(each).mean, milliseconds, -1),
        _Kind(f"{name}, p50", lambda each: of(each).p50, milliseconds, -1),
        _Kind(f"{name}, p90", lambda each: of(each).p90, milliseconds, -1),
        _Kind(f"{name}, p99", lambda each: of(each).p99, milliseconds, -1),
    ]


def percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def milliseconds(seconds: float) -> str:
    return f"{number(1000 * seconds)} ms"


def _best(values: Sequence[float | None], better: int) -> set[int]:
    known = [value for value in values if value is not None]
    if not better or len(known) < 2 or max(known) == min(known):
        return set()
    best = max(known) if better > 0 else min(known)
    return {place for place, value in enumerate(values) if value == best}
