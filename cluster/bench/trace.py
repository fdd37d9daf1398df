"""Traces in Mooncake's form: one JSON object per line with the times, lengths and prefix blocks of a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from cluster.bench.prompts import Span

TRACE_BLOCK_TOKENS = 512


class TraceError(ValueError):
    """A trace that can't be replayed. The message names the file and line."""


class TraceRow(msgspec.Struct, frozen=True):
    timestamp: float
    """Milliseconds from the trace's start."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    """One per block of 512 tokens, the last may be partial; equal ids mean that all up to there is equal."""


class ReplayedRequest(NamedTuple):
    start_s: float
    spans: tuple[Span, ...]
    output_tokens: int


def read_trace(path: Path) -> Iterator[TraceRow]:
    """The rows, one by one. Raises TraceError for a file that can't be read or a row that is not of the form."""
    decode = msgspec.json.Decoder(TraceRow).decode
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _checked(decode(line), path, number)
    except OSError as error:
        raise TraceError(f"{path}: can't be read: {error.strerror or error}") from error
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path}, line {number}: {error}") from error


def replay(
    rows: Iterable[TraceRow], time_scale: float, length_scale: float, max_input_tokens: int | None = None
) -> Iterator[ReplayedRequest]:
    """Requests whose prompts share exactly the blocks that the trace says, each block scaled like the rest.

    Times start at the first row's, so that the middle of a trace can be replayed too.
    """
    block_tokens = max(1, round(TRACE_BLOCK_TOKENS * length_scale))
    first: float | None = None
    for row in rows:
        first = row.timestamp if first is None else first
        yield ReplayedRequest(
            start_s=max(0.0, row.timestamp - first) / 1000 * time_scale,
            spans=_spans(row, block_tokens, max_input_tokens),
            output_tokens=max(1, round(row.output_length * length_scale)),
        )


def _spans(row: TraceRow, block_tokens: int, max_input_tokens: int | None) -> tuple[Span, ...]:
    full, rest = divmod(row.input_length, TRACE_BLOCK_TOKENS)
    tokens = full * block_tokens + round(rest * block_tokens / TRACE_BLOCK_TOKENS)
    left = max(1, tokens if max_input_tokens is None else min(tokens, max_input_tokens))
    spans: list[Span] = []
    for block in row.hash_ids:
        if left <= 0:
            break
        spans.append(Span(f"block/{block}", min(block_tokens, left)))
        left -= block_tokens
    return tuple(spans)


def _checked(row: TraceRow, path: Path, number: int) -> TraceRow:
    needed = -(-row.input_length // TRACE_BLOCK_TOKENS)
    if row.input_length < 1 or len(row.hash_ids) != needed:
        raise TraceError(
            f"{path}, line {number}: input_length is {row.input_length} with {len(row.hash_ids)} hash_ids; "
            f"needed: at least 1 token, and one id per {TRACE_BLOCK_TOKENS} tokens, that is {needed}"
        )
    return row
