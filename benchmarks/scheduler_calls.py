"""How long engines' schedulers spend in calls of the KV connector, from its histogram."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from benchmarks.engines import Engine
from benchmarks.harness import Report

METRIC = "manta_kv_scheduler_seconds"
LIMIT_MS = 1.0
_BUCKET = re.compile(rf"{METRIC}_bucket{{.*\ble=([^,}}]+)")


def calls_figure(report: Report, traffic: str, engines: Iterable[Engine]) -> None:
    """The 99th percentile over all calls of these engines since they were started."""
    buckets: Counter[float] = Counter()
    for engine in engines:
        for name, count in engine.metrics(METRIC).items():
            if found := _BUCKET.search(name):
                buckets[float(found[1])] += int(count)
    report.at_most(
        f"p99 of the scheduler's connector calls, {traffic}",
        quantile(buckets, 0.99) * 1e3,
        "ms",
        LIMIT_MS,
        f"{max(buckets.values(), default=0):,} calls",
    )


def quantile(buckets: Mapping[float, int], share: float) -> float:
    """Of a cumulative histogram by upper bounds, evenly spread within a bucket, as Prometheus has it.

    Raises ValueError for an empty one.
    """
    rank = share * buckets.get(math.inf, 0)
    if not rank:
        raise ValueError("no calls were counted")
    below, low = 0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= rank:
            return low if bound == math.inf else low + (bound - low) * (rank - below) / (count - below)
        below, low = count, bound
    raise ValueError("the last bucket is not the largest")
