"""What the connector's halves tell each other with every step of the engine.

vLLM carries these between its own processes; nothing here touches the store's socket.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from cache_store.events import ChunkKey
from cache_store.wire import SaveOutcome

RequestId = str
K = TypeVar("K")

Failure = str
"""Why a load failed: an outcome of `cache_store.wire`, a fault of `cache_store.chunk`, `unavailable`, `layout`."""


class Piece(NamedTuple):
    """A chunk, or what is needed of it, on its way into blocks of the engine."""

    key: ChunkKey
    first: int
    """Which block of the chunk the first of `blocks` takes."""
    blocks: tuple[int, ...]


class LoadWork(NamedTuple):
    request: RequestId
    pieces: tuple[Piece, ...]
    """In the prompt's order."""


class SaveWork(NamedTuple):
    """A whole chunk whose tokens are settled and whose KV is computed."""

    request: RequestId
    key: ChunkKey
    parent: bytes
    blocks: tuple[int, ...]
    tenant: str
    cost_s: float


@dataclass
class StepWork:
    """From the scheduler half to every worker."""

    identity: bytes
    """Digest of the engine identity as the scheduler half knows it; the workers' must be equal."""
    loads: list[LoadWork] = field(default_factory=list)
    saves: list[SaveWork] = field(default_factory=list)
    preempted: set[RequestId] = field(default_factory=set)
    """Their blocks are given to others with this step: no gather may read them any more."""
    cancelled: set[RequestId] = field(default_factory=set)
    """Loads that nobody waits for. Their blocks are free once the worker says that the load has ended."""
    closing: set[RequestId] = field(default_factory=set)
    """Finished requests whose blocks are kept until the worker says that its gathers have ended; told once each."""


class LoadResult(NamedTuple):
    """How a load ended in one worker."""

    request: RequestId
    tiers: tuple[int, ...]
    """Of the leading pieces that were loaded: codes of `cache_store.wire`."""
    failure: Failure
    """Of the piece after those; empty when all were loaded, `cancelled` for a load that was given up."""


@dataclass
class StepReport:
    """From the workers to the scheduler half: what ended since the last report."""

    loads: list[LoadResult] = field(default_factory=list)
    loaded_bytes: dict[int, int] = field(default_factory=dict)
    """Payload bytes by tier, verified and written to blocks."""
    gathered: dict[RequestId, int] = field(default_factory=dict)
    """Saves of a request that read its blocks no longer, whatever became of them."""
    saved: list[tuple[ChunkKey, SaveOutcome]] = field(default_factory=list)

    def aggregate(self, other: StepReport) -> StepReport:
        """Of several workers, in one step."""
        return StepReport(
            loads=self.loads + other.loads,
            loaded_bytes=_sum(self.loaded_bytes, other.loaded_bytes),
            gathered=_sum(self.gathered, other.gathered),
            saved=self.saved + other.saved,
        )

    def __bool__(self) -> bool:
        return bool(self.loads or self.loaded_bytes or self.gathered or self.saved)


def _sum(first: dict[K, int], second: dict[K, int]) -> dict[K, int]:
    return {key: first.get(key, 0) + second.get(key, 0) for key in first.keys() | second.keys()}
