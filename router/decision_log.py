"""The last decisions of a router: what was known, what was chosen, what came of it.

An entry holds the candidates that the policy saw, so decisions can be taken again from a log, by another policy or
through another adapter, without a cluster. A dump is JSON lines: a header, then one decision a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

import msgspec
from blake3 import blake3

from cache_store.events import ChunkKey
from router.candidates import Candidate, Candidates
from router.choice import Choice, Policy, RouteRequest

FORMAT = "manta-decisions"
VERSION = 2
MAX_ROWS = 50_000
"""Candidates over all decisions that a log keeps: some 300 bytes each."""


class DecisionLogError(ValueError):
    """A dump that can't be read. The message names the line."""


class Measured(msgspec.Struct, frozen=True):
    """What the request turned out to be."""

    status: int
    """HTTP status of the answer."""
    cached_tokens: int
    """Prompt tokens that the replica did not have to compute."""
    ttft_s: float | None
    """None when there was no token."""
    total_s: float
    served_s: float | None = None
    """From the decision to the first token, without the wait for a place: what was predicted. None as for `ttft_s`."""


class Decision(msgspec.Struct, frozen=True):
    """One choice of a replica, as it is written. A request that was retried has one per attempt."""

    number: int
    """Counted from 1 in the router's life."""
    time: float
    """Seconds since the epoch."""
    request: RouteRequest
    chunks: int
    """Full chunks of the shareable prefix."""
    digest: str
    """Names the chunk keys: equal for equal prefixes of the same tenant. See `keys_digest`."""
    candidates: tuple[Candidate, ...]
    choice: Choice | None
    """With the predicted seconds."""
    measured: Measured | None = None


class _Header(msgspec.Struct, frozen=True):
    format: str
    version: int


def keys_digest(keys: Sequence[ChunkKey]) -> str:
    """16 hex digits; the last key of a chain names all of it. Empty for no keys."""
    return blake3(keys[-1]).hexdigest(length=8) if keys else ""


class _Entry(NamedTuple):
    """A decision with the candidates as they were compared: hundreds of rows are written out only for who asks."""

    number: int
    time: float
    request: RouteRequest
    chunks: int
    digest: str
    candidates: Candidates
    choice: Choice | None
    measured: Measured | None = None

    def written(self) -> Decision:
        return Decision(
            self.number, self.time, self.request, self.chunks, self.digest, tuple(self.candidates.rows()),
            self.choice, self.measured,
        )  # fmt: skip


class DecisionLog:
    """The last decisions: as many as there is room for, and of as many candidates. Not thread-safe."""

    def __init__(self, capacity: int, clock: Callable[[], float], max_rows: int = MAX_ROWS) -> None:
        """`clock`: seconds since the epoch. `max_rows`: candidates over all decisions that are kept; the last decision
        is kept anyway. Raises ValueError for a capacity below 1."""
        if capacity < 1:
            raise ValueError(f"capacity of the decision log is {capacity}; needed: 1 or more")
        self._capacity = capacity
        self._max_rows = max_rows
        self._clock = clock
        self._count = 0
        self._rows = 0
        self._kept: dict[int, _Entry] = {}
        """By number, oldest first."""

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Decision]:
        """Oldest first."""
        return (entry.written() for entry in self._kept.values())

    def record(
        self, request: RouteRequest, keys: Sequence[ChunkKey], candidates: Candidates, choice: Choice | None
    ) -> int:
        """Returns the decision's number, for `measure`. The candidates' arrays must not change any more."""
        self._count += 1
        self._kept[self._count] = _Entry(
            self._count, self._clock(), request, len(keys), keys_digest(keys), candidates, choice
        )
        self._rows += len(candidates)
        while len(self._kept) > self._capacity or (self._rows > self._max_rows and len(self._kept) > 1):
            oldest = self._kept.pop(next(iter(self._kept)))
            self._rows -= len(oldest.candidates)
        return self._count

    def measure(self, number: int, measured: Measured) -> bool:
        """Add what came of a decision. False when it has left the log already."""
        entry = self._kept.get(number)
        if entry is None:
            return False
        self._kept[number] = entry._replace(measured=measured)
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError when what is kept is not the last decisions in their order."""
        assert list(self._kept) == list(range(self._count - len(self) + 1, self._count + 1))
        assert [entry.number for entry in self._kept.values()] == list(self._kept)
        assert self._rows == sum(len(entry.candidates) for entry in self._kept.values())
        assert len(self._kept) <= self._capacity
        assert self._rows <= self._max_rows or len(self._kept) == 1


def dump(decisions: Iterable[Decision], stream: BinaryIO) -> None:
    stream.write(msgspec.json.encode(_Header(FORMAT, VERSION)) + b"\n")
    for decision in decisions:
        stream.write(msgspec.json.encode(decision) + b"\n")


def load(stream: BinaryIO) -> list[Decision]:
    """Inverse of `dump`. Raises DecisionLogError."""
    decoder = msgspec.json.Decoder(Decision)
    decisions: list[Decision] = []
    for number, line in enumerate(stream, start=1):
        try:
            if number == 1:
                header = msgspec.json.decode(line, type=_Header)
                if header != _Header(FORMAT, VERSION):
                    raise DecisionLogError(
                        f"line 1: found {header.format} {header.version}, needed {FORMAT} {VERSION}"
                    )
            elif line.strip():
                decisions.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise DecisionLogError(f"line {number}: {error}") from error
    return decisions


def replay(decisions: Iterable[Decision], policy: Policy) -> list[Choice | None]:
    """What `policy` chooses where these decisions were taken."""
    return [policy.choose(decision.request, Candidates.of(decision.candidates)) for decision in decisions]
