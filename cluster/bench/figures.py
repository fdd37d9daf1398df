"""The figures of a result as a person reads them, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cluster.bench.metrics import Metrics, Stat
from cluster.bench.result import BenchResult

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
LATENCY_COLUMNS = ("mean", "std", "p50", "p75", "p90", "p95", "p99", "max")
COMPARED_COLUMNS = ("mean", "p50", "p90", "p99")


class Figure(NamedTuple):
    name: str
    value: float
    unit: str
    higher_is_better: bool | None = None
    """None where it is neither."""

    @property
    def text(self) -> str:
        return f"{number(self.value)} {self.unit}".rstrip()


def number(value: float) -> str:
    """Three significant digits or a whole number with thousands apart."""
    if value == 0 or abs(value) >= 1000 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def summary(metrics: Metrics) -> list[Figure]:
    """Counts, throughputs and what was cached; figures that the run doesn't have are left out."""
    figures = [
        Figure("requests completed", metrics.completed, ""),
        Figure("requests failed", metrics.failed, "", False),
        Figure("duration", metrics.elapsed_s, "s"),
        Figure("request throughput", metrics.request_throughput, "req/s", True),
        Figure("output throughput", metrics.output_throughput, "tok/s", True),
        Figure("total throughput", metrics.total_token_throughput, "tok/s", True),
        Figure("input tokens", metrics.input_tokens, ""),
        Figure("output tokens", metrics.output_tokens, ""),
        Figure("chunks in the busiest second", metrics.max_output_tokens_per_s, ""),
        Figure("requests in the busiest second", metrics.max_concurrent_requests, ""),
    ]
    if metrics.request_goodput is not None:
        figures.append(Figure("goodput", metrics.request_goodput, "req/s", True))
    if metrics.hit_ratio is not None:
        figures.append(Figure("cached input", metrics.hit_ratio * 100, "%", True))
    for name, count in (("interrupted", metrics.interrupted), ("retries after 429", metrics.retries)):
        if count:
            figures.append(Figure(name, count, ""))
    if metrics.client_delay.p99 >= 1:
        figures.append(Figure("sent late, p99", metrics.client_delay.p99, "ms", False))
    return figures


def stat_of(metrics: Metrics, latency: str) -> Stat:
    stat: Stat = getattr(metrics, latency)
    return stat


def latency_rows(metrics: Metrics) -> list[tuple[str, list[str]]]:
    """TTFT and the others with their values, in the order of LATENCY_COLUMNS."""
    return [
        (title, [number(getattr(stat_of(metrics, name), column)) for column in LATENCY_COLUMNS])
        for name, title in LATENCIES.items()
    ]


def counts(metrics: Metrics) -> list[tuple[str, list[tuple[str, int]]]]:
    """Requests by replica, input tokens by tier, errors by kind; only those that there are."""
    groups = (
        ("requests by replica", metrics.replicas),
        ("input tokens from", metrics.tiers),
        ("errors", metrics.errors),
    )
    return [(title, sorted(each.items(), key=_by_count)) for title, each in groups if each]


class ComparedRow(NamedTuple):
    name: str
    unit: str
    values: list[float | None]
    """One per result; None where a result lacks it."""
    higher_is_better: bool | None

    def change(self, index: int) -> float | None:
        """Relative to the first result's; None where there is nothing to relate."""
        first, value = self.values[0], self.values[index]
        return value / first - 1 if index and first and value is not None else None


def compared(results: Sequence[BenchResult]) -> list[ComparedRow]:
    columns = [{figure.name: figure for figure in _comparable(result.metrics)} for result in results]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = []
    for name in names:
        known = next(column[name] for column in columns if name in column)
        values = [column[name].value if name in column else None for column in columns]
        rows.append(ComparedRow(name, known.unit, values, known.higher_is_better))
    return rows


def _comparable(metrics: Metrics) -> Iterable[Figure]:
    yield from summary(metrics)
    for name, title in LATENCIES.items():
        for column in COMPARED_COLUMNS:
            yield Figure(f"{title} {column}", getattr(stat_of(metrics, name), column), "ms", False)


def settings(config: dict[str, Any]) -> list[tuple[str, str]]:
    """A configuration as names and values, without what was not set."""
    return [(name, str(value)) for name, value in _flat(config, "") if value not in (None, "", {})]


def _flat(fields: dict[str, Any], above: str) -> Iterable[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and value and name in ("target", "workload", "arrival"):
            yield from _flat(value, f"{name}.")
        else:
            yield above + name, value


def _by_count(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]
