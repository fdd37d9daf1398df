"""The values of `requests`: what is known of one request, and what is wanted for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cache_store.events import ChunkKey
from cache_store.wire import Source
from workers.vllm.connector.metadata import Piece, RequestId


class Geometry(NamedTuple):
    chunk_tokens: int
    block_tokens: int

    @property
    def chunk_blocks(self) -> int:
        return self.chunk_tokens // self.block_tokens


class Facts(NamedTuple):
    """What is fixed for a request from its arrival on."""

    shareable: int | None = None
    """Leading tokens that may be shared; None for all of them, those to be generated included."""
    may_load: bool = True
    may_save: bool = True
    tenant: str = ""
    sources: tuple[Source, ...] = ()
    skip_save: int = 0
    """Leading chunks that need no saving."""
    tag: str = ""
    """Under which the request's admission is told to the replica; empty for not at all."""


class HashWanted(NamedTuple):
    """Keys of chunks [first, end) of a request."""

    request: RequestId
    first: int
    end: int


class LookupWanted(NamedTuple):
    """Where chunks [first, end) of a request are. `serial` comes back with the answer."""

    request: RequestId
    serial: int
    first: int
    end: int
    sources: tuple[Source, ...]


class Admission(NamedTuple):
    """Where the KV of a request's prompt was when it first ran, in tokens. The others were computed."""

    tag: str
    request: RequestId
    local: int
    """In the engine's own blocks."""
    loaded: tuple[int, ...]
    """From the store, by tier code."""
    elsewhere: int
    """From another connector."""


@dataclass
class Looking:
    serial: int
    first: int
    deadline: float


@dataclass
class FoundChunks:
    """Chunks from `first` on, as they were when asked."""

    first: int
    tiers: bytes
    good_until: float
    bytes_per_chunk: int = 0
    seconds: Sequence[float] = ()
    lease: int = 0


@dataclass
class Loading:
    pieces: tuple[Piece, ...]
    lease: int
    tiers: list[int]
    """The slowest that any worker loaded a piece from; 0 for not told yet."""
    invalid: set[int] = field(default_factory=set)
    """Blocks that some worker could not fill."""


@dataclass
class RequestState:
    facts: Facts
    may_load: bool
    namespace: bytes = b""
    keys: list[ChunkKey] = field(default_factory=list)
    hashing: int = 0
    """Chunks whose keys are known or asked for."""
    local: int = 0
    """Tokens in the engine's own blocks, when last asked."""
    looking: Looking | None = None
    found: FoundChunks | None = None
    loading: Loading | None = None
    loaded: dict[int, int] = field(default_factory=dict)
    """Tokens of the last load by tier."""
    ran: bool = False
    blocks: list[int] = field(default_factory=list)
    next_save: int = 0
    """First chunk that was not considered for saving."""
    pending: list[int] = field(default_factory=list)
    """Chunks to be saved as soon as their keys are known."""
    gathering: int = 0
    """Saves that still may read blocks, each counted once per worker."""
    finished: bool = False
    closing: bool = False
