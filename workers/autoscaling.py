"""Replica count from demand that Serve can't see: routers forward requests past it."""

from __future__ import annotations

import math
from typing import Any

from ray.serve.config import AutoscalingContext

METRIC = "requests"
"""What `Replica.record_autoscaling_stats` reports: requests open at the replica's own server."""


def demand_policy(ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Enough replicas for `target_ongoing_requests` each. Serve applies bounds, delays and the start from zero.

    With no replica there is no report, and the demand is the handle calls with which routers that have requests
    waiting ask for one (`Router` in `router.deployment`); Serve queues those and counts them.
    """
    reported = (ctx.aggregated_metrics or {}).get(METRIC, {})
    demand = sum(reported.values()) + (ctx.total_queued_requests or 0)
    return math.ceil(demand / ctx.config.target_ongoing_requests), {}
