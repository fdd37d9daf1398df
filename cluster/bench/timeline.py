"""How a run went over time, in bins of a round width."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import msgspec

from cluster.bench.record import RequestRecord

_WIDTHS_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400)
_MOST_BINS = 120


class Timeline(msgspec.Struct, frozen=True):
    bin_s: float
    output_tokens_per_s: list[float]
    in_flight: list[float]
    """Mean over the bin."""


def timeline(records: Sequence[RequestRecord], elapsed_s: float) -> Timeline:
    """From the start of the run. Output tokens are spread evenly over the chunks that a request's came in."""
    width = next((width for width in _WIDTHS_S if elapsed_s / width <= _MOST_BINS), _WIDTHS_S[-1])
    count = max(1, math.ceil(elapsed_s / width))
    tokens, busy = [0.0] * count, [0.0] * count
    for record in records:
        share = record.output_tokens / len(record.token_s) if record.token_s else 0.0
        for at_s in record.token_s:
            tokens[_bin(record.sent_s + at_s, width, count)] += share
        for number, seconds in _overlaps(record.sent_s, record.end_s, width, count):
            busy[number] += seconds
    lengths = [min(width, elapsed_s - number * width) or width for number in range(count)]
    return Timeline(
        width,
        [each / length for each, length in zip(tokens, lengths, strict=True)],
        [each / length for each, length in zip(busy, lengths, strict=True)],
    )


def _bin(at_s: float, width: float, count: int) -> int:
    return max(0, min(count - 1, int(at_s / width)))


def _overlaps(start_s: float, end_s: float, width: float, count: int) -> Iterator[tuple[int, float]]:
    for number in itertools.count(_bin(start_s, width, count)):
        begin = max(start_s, number * width)
        if number >= count or begin >= end_s:
            return
        yield number, min(end_s, (number + 1) * width) - begin
