"""What the benchmark computes, against values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.bench.metrics import distribution, is_good, measure, percentile, stat
from cluster.bench.record import RequestRecord
from cluster.bench.timeline import timeline

numpy = pytest.importorskip("numpy", reason="the definition of percentiles is numpy's")


def record(*token_s: float, sent: float = 0.0, output: int | None = None, **more: Any) -> RequestRecord:
    fields = {
        "session": "s",
        "turn": 0,
        "due_s": sent,
        "sent_s": sent,
        "end_s": sent + (token_s[-1] if token_s else 0.0),
        "outcome": "ok",
        "token_s": token_s,
        "input_tokens": 10,
        "output_tokens": len(token_s) if output is None else output,
        "status": 200,
    }
    return RequestRecord(**{**fields, **more})


TWO = [record(0.1, 0.2, 0.4), record(0.3, 0.5, sent=1.0, output=5)]


def test_latencies_are_those_of_the_definitions() -> None:
    metrics = measure(TWO, elapsed_s=2.0)
    assert metrics.ttft.mean == pytest.approx(200)
    assert metrics.itl.count == 3
    assert metrics.itl.mean == pytest.approx(500 / 3)
    assert metrics.e2el.mean == pytest.approx(450)
    # (400 - 100) / (3 - 1) = 150 and (500 - 300) / (5 - 1) = 50
    assert metrics.tpot.mean == pytest.approx(100)
    assert metrics.ttft.std == pytest.approx(100)
    assert metrics.ttft.median == pytest.approx(200)
    assert metrics.ttft.p90 == pytest.approx(280)
    assert metrics.ttft.max == pytest.approx(300)


def test_throughputs_are_over_the_whole_run() -> None:
    metrics = measure(TWO, elapsed_s=2.0)
    assert metrics.request_throughput == 1
    assert metrics.output_throughput == 4
    assert metrics.total_token_throughput == 14


def test_only_requests_that_succeeded_count() -> None:
    failed = record(0.9, sent=0.5, outcome="error", status=503, error="HTTP 503: full")
    gone = record(outcome="interrupted", status=None)
    late = record(outcome="error", status=None, error="timeout: not complete after 1 s")
    metrics = measure([*TWO, failed, failed, gone, late], elapsed_s=2.0)
    assert (metrics.completed, metrics.failed, metrics.interrupted) == (2, 3, 1)
    assert metrics.errors == {"HTTP 503": 2, "timeout": 1}
    assert metrics.ttft == measure(TWO, 2.0).ttft
    assert metrics.input_tokens == 20


def test_an_answer_of_one_token_has_no_tpot() -> None:
    metrics = measure([record(0.2)], 1.0)
    assert metrics.tpot.count == metrics.itl.count == 0
    assert metrics.tpot.mean == 0


def test_goodput_counts_requests_that_keep_every_limit() -> None:
    metrics = measure(TWO, 2.0, {"ttft": 150})
    assert metrics.request_goodput == 0.5
    assert measure(TWO, 2.0).request_goodput is None
    assert is_good(TWO[0], {"ttft": 100, "itl": 150.001, "tpot": 150.001, "e2el": 400})
    assert not is_good(TWO[0], {"ttft": 150, "itl": 149})
    assert is_good(record(0.2), {"itl": 0, "tpot": 0})


def test_the_busiest_second_is_counted_from_the_first_request() -> None:
    metrics = measure([record(0.2, 0.9, 1.05, sent=5.0), record(0.1, sent=5.9)], 7.0)
    assert metrics.max_output_tokens_per_s == 2
    assert metrics.max_concurrent_requests == 2


def test_the_hit_ratio_comes_from_usage_and_else_from_the_header() -> None:
    tiers = {"hbm": 4, "dram": 2, "computed": 4}
    by_usage = record(0.1, cached_tokens=5, tiers=tiers)
    by_header = record(0.1, tiers=tiers)
    assert measure([by_usage], 1.0).hit_ratio == 0.5
    assert measure([by_header], 1.0).hit_ratio == 0.6
    assert measure([by_usage, by_header], 1.0).tiers == {"hbm": 8, "dram": 4, "computed": 8}
    assert measure([record(0.1)], 1.0).hit_ratio is None


def test_requests_are_counted_by_replica() -> None:
    records = [record(0.1, replica=name) for name in ("a", "b", "a", None)]
    assert measure(records, 1.0).replicas == {"a": 2, "b": 1}


def test_of_nothing_everything_is_zero() -> None:
    metrics = measure([], 0.0)
    assert metrics.request_throughput == metrics.output_throughput == metrics.ttft.p99 == 0
    assert metrics.hit_ratio is None


values = st.lists(st.floats(0, 1e4), min_size=1, max_size=60)


@settings(deadline=None)
@given(values, st.floats(0, 100))
def test_percentiles_are_numpys(seconds: list[float], percent: float) -> None:
    assert percentile(sorted(seconds), percent) == pytest.approx(
        float(numpy.percentile(seconds, percent)), rel=1e-9, abs=1e-9
    )


@settings(deadline=None)
@given(values)
def test_statistics_are_numpys(seconds: list[float]) -> None:
    found = stat(seconds)
    assert found.mean == pytest.approx(float(numpy.mean(seconds)) * 1000)
    assert found.std == pytest.approx(float(numpy.std(seconds)) * 1000, abs=1e-6)
    assert found.p99 == pytest.approx(float(numpy.percentile(seconds, 99)) * 1000)


@settings(deadline=None)
@given(values)
def test_a_histogram_holds_every_value(seconds: list[float]) -> None:
    shape = distribution(seconds)
    assert sum(shape.bins) == len(seconds)
    assert shape.curve == sorted(shape.curve)
    assert len(shape.curve) == 101


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 50), st.lists(st.floats(0.001, 20), min_size=1, max_size=5), st.integers(1, 50)
        ),
        min_size=1,
        max_size=8,
    )
)
def test_a_timeline_holds_every_token_and_every_second_in_flight(
    requests: list[tuple[float, list[float], int]],
) -> None:
    records = [record(*sorted(times), sent=sent, output=output) for sent, times, output in requests]
    elapsed = max(each.end_s for each in records)
    shape = timeline(records, elapsed)
    widths = [min(shape.bin_s, elapsed - place * shape.bin_s) for place in range(len(shape.in_flight))]
    assert len(widths) <= 121
    tokens = sum(rate * width for rate, width in zip(shape.output_tokens_per_s, widths, strict=True))
    busy = sum(mean * width for mean, width in zip(shape.in_flight, widths, strict=True))
    assert tokens == pytest.approx(sum(each.output_tokens for each in records), rel=1e-6)
    assert busy == pytest.approx(sum(each.end_s - each.sent_s for each in records), rel=1e-6)
