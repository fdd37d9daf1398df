"""The last decisions of a router: what was known, what was chosen, what came of it.

An entry holds the views that the policy saw, so decisions can be taken again from a log, by another policy or
through another adapter, without a cluster. A dump is JSON lines: a header, then one decision a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

import msgspec
from blake3 import blake3

from cache_store.events import ChunkKey
from router.policy import Choice, Policy, ReplicaView, RouteRequest

FORMAT = "manta-decisions"
VERSION = 1


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


class Decision(msgspec.Struct, frozen=True):
    """One choice of a replica. A request that was retried has one per attempt."""

    number: int
    """Counted from 1 in the router's life."""
    time: float
    """Seconds since the epoch."""
    request: RouteRequest
    chunks: int
    """Full chunks of the shareable prefix."""
    digest: str
    """Names the chunk keys: equal for equal prefixes of the same tenant. See `keys_digest`."""
    views: tuple[ReplicaView, ...]
    choice: Choice | None
    measured: Measured | None = None


class _Header(msgspec.Struct, frozen=True):
    format: str
    version: int


def keys_digest(keys: Sequence[ChunkKey]) -> str:
    """16 hex digits; the last key of a chain names all of it. Empty for no keys."""
    return blake3(keys[-1]).hexdigest(length=8) if keys else ""


class DecisionLog:
    """A ring: the oldest decision makes room for the newest. Not thread-safe."""

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        """`clock`: seconds since the epoch. Raises ValueError for a capacity below 1."""
        if capacity < 1:
            raise ValueError(f"capacity of the decision log is {capacity}; needed: 1 or more")
        self._ring: list[Decision | None] = [None] * capacity
        self._clock = clock
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, len(self._ring))

    def __iter__(self) -> Iterator[Decision]:
        """Oldest first."""
        for number in range(self._count - len(self) + 1, self._count + 1):
            decision = self._ring[number % len(self._ring)]
            assert decision is not None
            yield decision

    def record(
        self,
        request: RouteRequest,
        keys: Sequence[ChunkKey],
        views: Sequence[ReplicaView],
        choice: Choice | None,
    ) -> int:
        """Returns the decision's number, for `measure`."""
        self._count += 1
        self._ring[self._count % len(self._ring)] = Decision(
            self._count, self._clock(), request, len(keys), keys_digest(keys), tuple(views), choice
        )
        return self._count

    def measure(self, number: int, measured: Measured) -> bool:
        """Add what came of a decision. False when it has left the ring already."""
        slot = number % len(self._ring)
        decision = self._ring[slot]
        if decision is None or decision.number != number:
            return False
        self._ring[slot] = msgspec.structs.replace(decision, measured=measured)
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError when the ring is not the last decisions in their order."""
        numbers = [decision.number for decision in self]
        assert numbers == list(range(self._count - len(self) + 1, self._count + 1))
        assert sum(decision is not None for decision in self._ring) == len(self)


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
    return [policy.choose(decision.request, decision.views) for decision in decisions]
