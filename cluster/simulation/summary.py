"""The figures of a run."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cluster.simulation.balance import balance
from cluster.simulation.config import SimulationConfig
from cluster.simulation.records import OUTCOMES, SOURCES, Records
from cluster.simulation.simulator import Outcomes

PARTS = (0.5, 0.9, 0.99)
_CURVE_POINTS = 100
_MOST_BINS = 120


class Spread(msgspec.Struct, frozen=True):
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Summary(msgspec.Struct, frozen=True):
    """One policy on one load. Ratios are parts of prompt tokens, of requests that were answered."""

    policy: str
    requests: int
    answered: int
    broken: int
    refused: int
    retried: int
    """Answered after a replica had died."""
    duration_s: float
    ceiling: float
    """The hit ratio of a cache without bounds."""
    hit: float
    hits: dict[str, float]
    """By where the KV was."""
    ttft: Spread
    itl: Spread
    e2e: Spread
    balance_p50: float | None
    """Sliding minute, busiest replica over mean, by seconds of work given to them."""
    balance_p99: float | None
    prediction_p50: float | None
    """Median relative error of the predicted TTFT; None for a policy that predicts none."""
    prediction_p90: float | None
    moved_bytes: dict[str, int]
    """From where, or for what."""
    computed_tokens: int
    output_tokens_per_s: float
    gpu_seconds: float
    most_replicas: int
    ttft_curve: list[float]
    """Seconds by percentile, 0 to 99."""
    balance_curve: list[tuple[float, float]]
    hit_curve: list[tuple[float, float]]
    flight_curve: list[tuple[float, float]]
    """Open requests over time."""


def summarise(policy: str, config: SimulationConfig, ceiling: float, run: Outcomes) -> Summary:
    records = run.records
    outcome = np.frombuffer(bytes(records.outcome), dtype=np.uint8)
    good = outcome == OUTCOMES.index("answered")
    prompt, computed = _column(records.prompt_tokens)[good], _column(records.computed)[good]
    arrived, first = _column(records.arrived_s)[good], _column(records.first_s)[good]
    decided, ended = _column(records.decided_s)[good], _column(records.ended_s)[good]
    cached = {source: _column(records.cached[source])[good] for source in SOURCES}
    asked = max(1, int(prompt.sum()))
    work = _column(records.compute_s)[good] + _column(records.output_tokens)[good] * _decode_s(
        records, config
    )
    even = balance(decided, _column(records.replica)[good], work, config.all_replicas)
    errors = _prediction_errors(_column(records.predicted_s)[good], first - decided)
    counts = [int((outcome == kind).sum()) for kind in range(len(OUTCOMES))]
    output = int(_column(records.output_tokens)[good].sum())
    gaps = run.gaps.percentiles(PARTS)
    return Summary(
        policy=policy,
        requests=len(records),
        answered=counts[0],
        broken=counts[1],
        refused=counts[2],
        retried=int((_column(records.attempts)[good] > 1).sum()),
        duration_s=run.ended_s,
        ceiling=ceiling,
        hit=float((prompt - computed).sum() / asked),
        hits={source: float(tokens.sum() / asked) for source, tokens in cached.items()},
        ttft=_spread(first - arrived),
        itl=Spread(run.gaps.mean, *gaps),
        e2e=_spread(ended - arrived),
        balance_p50=_known(even.p50),
        balance_p99=_known(even.p99),
        prediction_p50=_known(float(np.percentile(errors, 50))) if len(errors) else None,
        prediction_p90=_known(float(np.percentile(errors, 90))) if len(errors) else None,
        moved_bytes=_moved(run),
        computed_tokens=int(computed.sum()),
        output_tokens_per_s=output / run.ended_s if run.ended_s else 0.0,
        gpu_seconds=run.replica_seconds * config.engine.gpus,
        most_replicas=run.most_replicas,
        ttft_curve=_curve(first - arrived),
        balance_curve=even.curve,
        hit_curve=_hit_curve(decided, prompt, computed),
        flight_curve=_flight_curve(records, run.ended_s),
    )


def _column(values: Any) -> NDArray[Any]:
    return np.frombuffer(values, dtype=np.float64 if values.typecode == "d" else np.int64)


def _spread(seconds: NDArray[np.float64]) -> Spread:
    if not len(seconds):
        return Spread(0.0, 0.0, 0.0, 0.0)
    return Spread(float(seconds.mean()), *(float(value) for value in np.percentile(seconds, [50, 90, 99])))


def _curve(seconds: NDArray[np.float64]) -> list[float]:
    if not len(seconds):
        return []
    return [float(value) for value in np.percentile(seconds, range(_CURVE_POINTS))]


def _known(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _decode_s(records: Records, config: SimulationConfig) -> float:
    """Engine seconds of one output token: its stream's, and its part of a step that as many share as have room."""
    tokens = float(_column(records.prompt_tokens).sum() + _column(records.output_tokens).sum())
    each = max(1.0, tokens / max(1, len(records)) / config.chunk_tokens)
    streams = max(1.0, min(config.engine.max_running, config.blocks / each))
    return config.engine.decode_stream_s + config.engine.decode_step_s / streams


def _prediction_errors(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> NDArray[np.float64]:
    known = (predicted >= 0) & (measured > 0)
    errors: NDArray[np.float64] = np.abs(predicted[known] - measured[known]) / measured[known]
    return errors


def _moved(run: Outcomes) -> dict[str, int]:
    moved = run.moved
    return {
        **{f"from {source}": nbytes for source, nbytes in moved.loaded.items()},
        "saved to dram": moved.saved,
        **{f"written to {tier}": nbytes for tier, nbytes in moved.written.items()},
        "prefill to decode": moved.transferred,
    }


def _hit_curve(
    at_s: NDArray[np.float64], prompt: NDArray[np.int64], computed: NDArray[np.int64]
) -> list[tuple[float, float]]:
    if not len(at_s):
        return []
    edges = np.linspace(0, at_s.max() + 1e-9, min(_MOST_BINS, len(at_s)) + 1)
    asked = np.histogram(at_s, edges, weights=prompt)[0]
    missed = np.histogram(at_s, edges, weights=computed)[0]
    middles = (edges[:-1] + edges[1:]) / 2
    return [
        (float(at), float(100 * (1 - miss / total)))
        for at, miss, total in zip(middles, missed, asked, strict=True)
        if total
    ]


def _flight_curve(records: Records, ended_s: float) -> list[tuple[float, float]]:
    if not len(records):
        return []
    came, left = np.sort(_column(records.arrived_s)), np.sort(_column(records.ended_s))
    times = np.linspace(0, ended_s, 2 * _MOST_BINS)
    open_then = np.searchsorted(came, times, "right") - np.searchsorted(left, times, "right")
    return [(float(at), float(count)) for at, count in zip(times, open_then, strict=True)]
