"""What the store's benchmark makes of its samples."""

from __future__ import annotations

import math

import pytest

from benchmarks import store_choice, store_sharing, store_traffic, store_ttft
from benchmarks.harness import Report
from benchmarks.scheduler_calls import quantile
from benchmarks.store_sharing import Level


def verdicts(report: Report) -> list[bool | None]:
    return [figure.holds for figure in report.figures]


def test_a_quantile_lies_within_the_bucket_that_it_falls_in() -> None:
    buckets = {0.001: 90, 0.002: 100, math.inf: 100}
    assert quantile(buckets, 0.95) == pytest.approx(0.0015)
    assert quantile(buckets, 0.45) == pytest.approx(0.0005)
    assert quantile(buckets | {math.inf: 1000}, 0.99) == 0.002
    with pytest.raises(ValueError, match="no calls"):
        quantile({0.001: 0, math.inf: 0}, 0.99)


def test_a_tier_holds_by_its_ratio_to_the_local_hits_of_the_same_rounds() -> None:
    local = [0.1, 0.2, 0.1, 0.2]
    found = {"local": local, "dram": [1.4 * s for s in local], "peer": [2.6 * s for s in local]}
    found |= {"disk": [0.1, 0.9, 0.1, 0.9], "lmcache": [0.3, 0.6, 0.3, 0.6]}
    report = Report("x")
    store_ttft.figures(report, found, cold=[4.0])
    assert verdicts(report) == [None, True, False, False, True]


def test_without_lmcache_there_is_a_row_with_the_reason_and_no_verdict() -> None:
    report = Report("x")
    store_ttft.figures(report, {way: [0.1, 0.1] for way in ("local", "dram", "peer", "disk")}, cold=[4.0])
    assert report.figures[-1].value is None
    assert report.figures[-1].holds is None
    assert "not installed" in report.figures[-1].against


def test_the_actors_cpu_counts_against_the_connector() -> None:
    plain, ours = [[1.0, 0.01]] * 3, [[1.01, 0.03]] * 3
    report = Report("x")
    store_traffic.figures(report, {"plain": plain, "manta": ours})
    assert verdicts(report) == [True, False]


def test_throughput_is_compared_where_the_ttft_is_not_worse() -> None:
    without = [Level(1, 2.0, 10.0, 0.1), Level(2, 4.0, 11.0, 0.1)]
    ours = [Level(1, 0.5, 30.0, 0.9), Level(2, 1.0, 40.0, 0.9), Level(4, 3.0, 50.0, 0.9)]
    report = Report("x")
    store_sharing.figures(report, without, ours[:2])
    gained, concurrency = report.figures[-2:]
    assert (gained.value, gained.holds) == (4.0, True)
    assert concurrency.value == 2 * store_sharing.ENGINES
    report = Report("x")
    store_sharing.figures(report, without[:1], ours[2:])
    assert report.figures[-1].holds is False


def test_a_slow_tier_must_not_be_chosen() -> None:
    report = Report("x")
    store_choice.figures(report, loaded=[3.0], again=[0.5, 0.6], computed=[0.5], tokens=256)
    assert verdicts(report) == [True, False]
