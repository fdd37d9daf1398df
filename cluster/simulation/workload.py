"""What is asked of the cluster: requests in the order of their arrival, read from a trace or made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from cache_store.events import KEY_BYTES, ChunkKey
from cluster.bench.trace import TRACE_BLOCK_TOKENS


class TraceError(ValueError):
    """A trace that can't be played. The message says FILE:LINE, what was found and what is needed."""


class Request(NamedTuple):
    at_s: float
    """Seconds from the start."""
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    """Names of the prompt's full chunks: equal names mean that everything up to there is equal."""
    answer_blocks: Sequence[int] = ()
    """Names of the chunks that the answer fills, behind those of the prompt; empty where they are not known."""
    session: int = 0
    """Equal for the turns of one conversation; 0 for none."""
    turn: int = 0


def chunk_key(block: int) -> ChunkKey:
    """A block's name as the key that index and stores know chunks by; its first byte spreads over their shards."""
    return ChunkKey(block.to_bytes(KEY_BYTES, "little"))


def chunk_keys(request: Request) -> list[ChunkKey]:
    return [ChunkKey(block.to_bytes(KEY_BYTES, "little")) for block in request.blocks]


class Workload(ABC):
    """Requests, and those that follow from answers."""

    requests: int
    """How many there will be in all."""

    @abstractmethod
    def arrivals(self) -> Iterator[Request]:
        """Those whose time is known before, in order of time. Equal every time it is called."""

    def follow_up(self, request: Request, ended_s: float) -> Request | None:
        """What comes because this request was answered at that time; None for nothing. Pure."""
        return None


class TraceRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row in Mooncake's form."""

    timestamp: float
    """Milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    """One per block of the prompt, the last may be partial."""


class Trace(Workload):
    """Recorded requests, kept in a few arrays: traces of a million requests fit."""

    def __init__(self, rows: Iterable[TraceRow], time_scale: float, block_tokens: int) -> None:
        """`rows` must be valid and in order of time; times begin at the first row's."""
        self._at, self._prompt, self._output = array("d"), array("l"), array("l")
        self._blocks, self._ends = array("q"), array("l", [0])
        first: float | None = None
        for row in rows:
            first = row.timestamp if first is None else first
            self._at.append((row.timestamp - first) / 1000 * time_scale)
            self._prompt.append(row.input_length)
            self._output.append(max(1, row.output_length))
            # A chunk is shared when it is full.
            self._blocks.extend(row.hash_ids[: row.input_length // block_tokens])
            self._ends.append(len(self._blocks))
        self.requests = len(self._at)

    def first(self, requests: int) -> Trace:
        """So many of them from the start."""
        part = Trace((), 1.0, 1)
        part._at, part._prompt = self._at[:requests], self._prompt[:requests]
        part._output = self._output[:requests]
        part._ends = self._ends[: requests + 1]
        part._blocks = self._blocks[: part._ends[-1]]
        part.requests = len(part._at)
        return part

    def arrivals(self) -> Iterator[Request]:
        ends, blocks = self._ends, self._blocks
        for number, (at, prompt, output) in enumerate(zip(self._at, self._prompt, self._output, strict=True)):
            yield Request(at, prompt, output, blocks[ends[number] : ends[number + 1]])


def read_trace(path: Path, time_scale: float = 1.0, block_tokens: int = TRACE_BLOCK_TOKENS) -> Trace:
    """Raises TraceError for a file that can't be read or has no rows, and for the first row that is not of the form."""
    try:
        with path.open("rb") as lines:
            trace = Trace(_rows(lines, path, block_tokens), time_scale, block_tokens)
    except OSError as error:
        raise TraceError(f"{path}: can't be read: {error.strerror or error}") from error
    if not trace.requests:
        raise TraceError(f"{path}:1: found no rows; needed: a JSON object per line with {_FIELDS}")
    return trace


_FIELDS = ", ".join(TraceRow.__struct_fields__)


def _rows(lines: Iterable[bytes], path: Path, block_tokens: int) -> Iterator[TraceRow]:
    decode = msgspec.json.Decoder(TraceRow).decode
    last = float("-inf")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
            if problem := _problem(row, last, block_tokens):
                raise TraceError(f"{path}:{number}: {problem}")
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            found = line.strip()[:80].decode(errors="replace")
            raise TraceError(
                f"{path}:{number}: {error}; found {found!r}; needed: an object with {_FIELDS}"
            ) from error
        last = row.timestamp
        yield row


def _problem(row: TraceRow, last: float, block_tokens: int) -> str:
    """What is wrong with a row; empty for nothing."""
    if not 0 <= row.timestamp < float("inf"):
        return f"timestamp is {row.timestamp:g}; needed: milliseconds, 0 or more"
    if row.timestamp < last:
        return f"timestamp is {row.timestamp:g} behind a row with {last:g}; needed: rows in order of time"
    if row.input_length < 1:
        return f"input_length is {row.input_length}; needed: 1 token or more"
    if row.output_length < 0:
        return f"output_length is {row.output_length}; needed: 0 tokens or more"
    needed = -(-row.input_length // block_tokens)
    if len(row.hash_ids) != needed:
        return (
            f"{len(row.hash_ids)} hash_ids for an input_length of {row.input_length}; needed: one for each "
            f"{block_tokens} tokens, that is {needed}"
        )
    if min(row.hash_ids) < 0 or max(row.hash_ids) >= 2**63:
        return f"hash_ids go from {min(row.hash_ids)} to {max(row.hash_ids)}; needed: 0 to 2^63 - 1"
    if len(set(row.hash_ids)) < needed:
        twice = next(block for block in row.hash_ids if row.hash_ids.count(block) > 1)
        return f"hash_ids has {twice} twice; needed: each once, since an id stands for all up to its block"
    return ""
