"""The connector's counts in vLLM's clothes, and as Prometheus metrics on the engine's own page."""

from __future__ import annotations

import contextlib
from typing import Any

from prometheus_client import REGISTRY, Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from workers.vllm.connector.counts import merge, quantile

_BOUNDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1)

# Name in the counts, name of the metric, its label, what it says.
_COUNTERS = (
    ("loaded_tokens", "manta_kv_loaded_tokens", "tier", "Tokens whose KV was loaded from the store."),
    (
        "loaded_bytes",
        "manta_kv_loaded_bytes",
        "tier",
        "Bytes of KV that were loaded, verified and put in place.",
    ),
    ("saved_chunks", "manta_kv_saved_chunks", "outcome", "Parts of chunks that were to be saved."),
    (
        "load_failures",
        "manta_kv_load_failures",
        "reason",
        "Loads that failed; what they lacked was computed.",
    ),
    ("lookups", "manta_kv_lookups", "outcome", "Look-ups of prompts in the store."),
)


_registered: list[Any] = []
"""Of the process's last engine. Like vLLM, which does so with its own, a new engine takes the place of the old one."""


class MantaStats(KVConnectorStats):
    """`data` is what `workers.vllm.connector.counts.merge` understands."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> MantaStats:
        return MantaStats(data=merge(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        totals = {name: sum(self.data[name].values()) for name, *_ in _COUNTERS if name in self.data}
        if "calls" in self.data:
            totals["p99 of scheduler calls (s)"] = quantile(self.data["calls"], 0.99)
        return totals

    def is_empty(self) -> bool:
        return not self.data


class MantaPromMetrics(KVConnectorPromMetrics):
    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        while _registered:
            with contextlib.suppress(KeyError):
                REGISTRY.unregister(_registered.pop())
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._counters = {
            name: counter(name=metric, documentation=text, labelnames=[*labelnames, label])
            for name, metric, label, text in _COUNTERS
        }
        calls = histogram(
            name="manta_kv_scheduler_seconds",
            documentation="Time that the engine's scheduler spends in one call of the KV connector.",
            buckets=_BOUNDS,
            labelnames=labelnames,
        )
        _registered.extend((*self._counters.values(), calls))
        self._calls = {engine: calls.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, counter in self._counters.items():
            for label, amount in transfer_stats_data.get(name, {}).items():
                counter.labels(*values, label).inc(amount)
        for seconds in transfer_stats_data.get("calls", ()):
            self._calls[engine_idx].observe(seconds)
