"""How many replicas the demand asks for. Bounds, delays and smoothing are Serve's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.autoscaling import METRIC, demand_policy


def context(open_requests: dict[str, float] | None, queued: float | None = 0, target: float = 8) -> Any:
    """As Serve gives it: what replicas report by metric and replica, and handle calls that wait."""
    metrics = None if open_requests is None else {METRIC: open_requests}
    config = SimpleNamespace(target_ongoing_requests=target)
    return SimpleNamespace(aggregated_metrics=metrics, total_queued_requests=queued, config=config)


@pytest.mark.parametrize(
    ("open_requests", "replicas"),
    [
        ({"a": 0}, 0),
        ({"a": 1}, 1),
        ({"a": 8}, 1),
        ({"a": 9}, 2),
        ({"a": 20, "b": 4}, 3),
        ({"a": 0.5, "b": 7.6}, 2),
    ],
)
def test_every_replica_carries_the_target(open_requests: dict[str, float], replicas: int) -> None:
    assert demand_policy(context(open_requests)) == (replicas, {})


@pytest.mark.parametrize("nothing", [None, {}])
def test_calls_that_wait_for_a_first_replica_ask_for_one(nothing: dict[str, float] | None) -> None:
    assert demand_policy(context(nothing, queued=1))[0] == 1


def test_no_report_and_no_call_is_no_demand() -> None:
    assert demand_policy(context(None, queued=None))[0] == 0


def test_other_metrics_do_not_count() -> None:
    ctx = context({"a": 1})
    ctx.aggregated_metrics["other"] = {"a": 1000}
    assert demand_policy(ctx)[0] == 1


@given(
    st.dictionaries(st.text(max_size=3), st.integers(0, 1000), max_size=8),
    st.integers(0, 50),
    st.floats(0.5, 64),
)
def test_the_count_is_the_smallest_that_keeps_to_the_target(
    open_requests: dict[str, float], queued: int, target: float
) -> None:
    wanted, _ = demand_policy(context(open_requests, queued, target))
    demand = sum(open_requests.values()) + queued
    assert wanted * target >= demand * (1 - 1e-9)
    assert (wanted - 1) * target < demand or wanted == 0
