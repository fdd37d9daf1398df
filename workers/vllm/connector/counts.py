"""What the connector counts: plain numbers that travel from the engine to the replica with vLLM's statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from workers.vllm.connector.request_state import Admission

SUMS = ("loaded_tokens", "loaded_bytes", "saved_chunks", "load_failures", "lookups")
"""Counts by a label: tier, tier, outcome, reason, outcome."""


CALLS_AT_ONCE = 64
"""Times of calls travel in lots: most steps of an engine have nothing else to tell, and then tell nothing."""


class Counts:
    """Belongs to the scheduler's thread."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, float]] = {name: {} for name in SUMS}
        self._calls: list[float] = []
        self._admissions: dict[str, dict[str, list[Any]]] = {}

    def add(self, name: str, label: str, amount: float = 1) -> None:
        """`name` is one of SUMS."""
        counts = self._sums[name]
        counts[label] = counts.get(label, 0) + amount

    def admitted(self, admission: Admission) -> None:
        requests = self._admissions.setdefault(admission.tag, {})
        requests[admission.request] = [admission.local, list(admission.loaded), admission.elsewhere]

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time in a connector call on the scheduler's thread."""
        start = perf_counter()
        try:
            yield
        finally:
            self._calls.append(perf_counter() - start)

    def take(self) -> dict[str, Any]:
        """What was counted since the last time, as `merge` understands it: strings, numbers, lists and mappings."""
        taken: dict[str, Any] = {name: counts for name, counts in self._sums.items() if counts}
        if len(self._calls) >= CALLS_AT_ONCE:
            taken["calls"], self._calls = self._calls, []
        if self._admissions:
            taken["admissions"] = self._admissions
        self._sums = {name: {} for name in SUMS}
        self._admissions = {}
        return taken


def merge(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The counts of two intervals as those of one."""
    merged = dict(first)
    for name, value in second.items():
        if name not in merged:
            merged[name] = value
        elif name in SUMS:
            merged[name] = _sum(merged[name], value)
        elif name == "calls":
            merged[name] = [*merged[name], *value]
        elif name == "admissions":
            merged[name] = {
                tag: merged[name].get(tag, {}) | value.get(tag, {}) for tag in merged[name] | value
            }
        else:
            merged[name] = value
    return merged


def quantile(calls: Sequence[float], share: float) -> float:
    """The call at `share` of all, by length; `calls` are at least one."""
    return sorted(calls)[min(int(share * len(calls)), len(calls) - 1)]


def _sum(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    return {label: first.get(label, 0) + second.get(label, 0) for label in first.keys() | second.keys()}
