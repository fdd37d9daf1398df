"""What a run came to, by the definitions of vLLM's `vllm bench serve`.

TTFT is from sending to the first chunk with a choice, an ITL the time between two such chunks, E2EL from sending to
the last one, and TPOT (E2EL - TTFT) / (output tokens - 1) of a request with more than one token. Throughputs are
over the time from the start to the last answer. Only requests that succeeded count. Percentiles interpolate
linearly, as numpy's do; of no values everything is 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from cluster.bench.config import GoodputMetric
from cluster.bench.record import RequestRecord

PERCENTILES = (50, 75, 90, 95, 99)
HISTOGRAM_BINS = 40


class Stat(msgspec.Struct, frozen=True):
    """Milliseconds."""

    count: int
    mean: float
    median: float
    std: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float
    max: float


class Distribution(msgspec.Struct, frozen=True):
    """Milliseconds. Enough to draw and compare without the values themselves."""

    curve: list[float]
    """Percentiles 0 to 100."""
    bin_start: float
    bin_width: float
    bins: list[int]
    """Up to the 99th percentile; what is above is in the last one."""


class Metrics(msgspec.Struct, frozen=True):
    completed: int
    failed: int
    interrupted: int
    retries: int
    elapsed_s: float
    input_tokens: int
    output_tokens: int
    request_throughput: float
    """Requests per second."""
    output_throughput: float
    """Tokens per second, as the next."""
    total_token_throughput: float
    request_goodput: float | None
    """Requests per second that kept every limit; None where there was no limit."""
    max_output_tokens_per_s: float
    """Chunks in the busiest of the seconds counted from the first request."""
    max_concurrent_requests: int
    """Requests open at any time in one such second, the most of all."""
    ttft: Stat
    tpot: Stat
    itl: Stat
    e2el: Stat
    client_delay: Stat
    """How much later than due a request was sent: the bound on requests in flight, or a client that is too slow."""
    cached_tokens: int | None
    hit_ratio: float | None
    """Cached over input tokens; None where neither usage nor header tells what was cached."""
    tiers: dict[str, int]
    """Input tokens by tier and `computed`, from the router's headers."""
    replicas: dict[str, int]
    """Requests by replica."""
    errors: dict[str, int]


def measure(
    records: Sequence[RequestRecord],
    elapsed_s: float,
    goodput_ms: Mapping[GoodputMetric, float] | None = None,
) -> Metrics:
    """`elapsed_s` is positive where there are records; `goodput_ms` maps ttft, tpot, itl, e2el to a limit."""
    done = [record for record in records if record.outcome == "ok"]
    seconds = elapsed_s or math.inf
    input_tokens = sum(record.input_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    good = sum(is_good(record, goodput_ms) for record in done) if goodput_ms else 0
    busiest = peaks(done)
    cached = [tokens for record in done if (tokens := cached_tokens(record)) is not None]
    return Metrics(
        completed=len(done),
        failed=sum(record.outcome == "error" for record in records),
        interrupted=sum(record.outcome == "interrupted" for record in records),
        retries=sum(record.retries for record in records),
        elapsed_s=elapsed_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        request_throughput=len(done) / seconds,
        output_throughput=output_tokens / seconds,
        total_token_throughput=(input_tokens + output_tokens) / seconds,
        request_goodput=good / seconds if goodput_ms else None,
        max_output_tokens_per_s=busiest[0],
        max_concurrent_requests=busiest[1],
        ttft=stat(record.ttft_s for record in done),
        tpot=stat(tpot for record in done if (tpot := tpot_s(record)) is not None),
        itl=stat(gap for record in done for gap in record.gaps_s),
        e2el=stat(record.latency_s for record in done),
        client_delay=stat(max(0.0, record.sent_s - record.due_s) for record in done),
        cached_tokens=sum(cached) if cached else None,
        hit_ratio=sum(cached) / input_tokens if cached and input_tokens else None,
        tiers=_total(record.tiers for record in done),
        replicas=dict(Counter(record.replica for record in done if record.replica is not None)),
        errors=dict(Counter(error_kind(record.error) for record in records if record.error is not None)),
    )


def tpot_s(record: RequestRecord) -> float | None:
    """None for an answer of one token, which has none."""
    if record.output_tokens <= 1:
        return None
    return (record.latency_s - record.ttft_s) / (record.output_tokens - 1)


def is_good(record: RequestRecord, limits_ms: Mapping[GoodputMetric, float]) -> bool:
    """Whether a request kept every limit. Its ITL is the mean of its own gaps; where it has none, and where it has
    no TPOT, that limit is kept."""
    gaps = record.gaps_s
    values: dict[GoodputMetric, float] = {
        "ttft": record.ttft_s,
        "tpot": tpot_s(record) or 0.0,
        "itl": sum(gaps) / len(gaps) if gaps else 0.0,
        "e2el": record.latency_s,
    }
    return all(values[name] * 1000 <= limit for name, limit in limits_ms.items())


def cached_tokens(record: RequestRecord) -> int | None:
    """What usage says; the header's tiers where usage says nothing."""
    if record.cached_tokens is not None:
        return record.cached_tokens
    return sum(record.tiers.values()) - record.tiers.get("computed", 0) if record.tiers else None


def peaks(done: Sequence[RequestRecord]) -> tuple[float, int]:
    """The most chunks and the most open requests in one second counted from the first request."""
    if not done:
        return 0.0, 0
    start = min(record.sent_s for record in done)
    chunks, open_requests = Counter[int](), Counter[int]()
    for record in done:
        sent = record.sent_s - start
        chunks.update(int(sent + at) for at in record.token_s)
        open_requests.update(range(int(sent), int(sent + record.latency_s) + 1))
    return float(max(chunks.values())), max(open_requests.values())


def stat(seconds: Iterable[float]) -> Stat:
    values = sorted(value * 1000 for value in seconds)
    mean = math.fsum(values) / len(values) if values else 0.0
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values) if values else 0.0
    at = {p: percentile(values, p) for p in PERCENTILES}
    return Stat(
        len(values), mean, at[50], math.sqrt(variance), at[50], at[75], at[90], at[95], at[99],
        values[-1] if values else 0.0,
    )  # fmt: skip


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in ascending order; 0 of none."""
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def distribution(seconds: Iterable[float]) -> Distribution:
    values = sorted(value * 1000 for value in seconds)
    curve = [percentile(values, percent) for percent in range(101)]
    low, high = curve[0], curve[99]
    width = (high - low) / HISTOGRAM_BINS or 1.0
    bins = [0] * HISTOGRAM_BINS
    for value in values:
        bins[min(HISTOGRAM_BINS - 1, int((value - low) / width))] += 1
    return Distribution(curve, low, width, bins)


def error_kind(error: str) -> str:
    """`HTTP 503`, `timeout`, `connection` or `answer`."""
    return error.partition(":")[0]


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return dict(total)
