"""Messages between an engine and the cache actor of its node, over a Unix socket.

An engine has one connection for its scheduler half and one for each of its workers. A worker's `Register` comes
with a file descriptor (SCM_RIGHTS) of its staging area: shared memory cut into equal slots, which both sides map.
Payloads cross there alone; messages name slots. Who owns a slot is told by the messages: the actor may touch one
between a `Load` or `Save` that names it and the answer, the engine at all other times.

Every request has an `id` of the engine's choosing, unique while it is open, and gets exactly one answer with it.
Answers come in any order. When a connection ends, the actor drops its leases and forgets its slots.

Frames are those of the event stream: a little-endian uint32 length, then msgpack. Decoding is strict: what does not
decode, or does not fit (a slot that is not there, a payload longer than a slot) ends the connection and is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from cache_store.chunk import Header
from cache_store.events import KEY_BYTES, ProtocolError

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_KEYS = 65_536
"""Keys in one look-up at most."""
MAX_SOURCES = 4_096
MAX_OPEN_REQUESTS = 256
"""Loads and saves of one connection that wait for their answers at most."""
MAX_SECONDS = 3_600.0
"""The longest time limit or lease."""

# Checked where a message is decoded, not where it is made.
Id = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Ranks = Annotated[int, Meta(ge=1, le=2**16)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]

ABSENT, DRAM, PEER, DISK, REMOTE = range(5)
"""Where a chunk is, seen from the actor that answers: one byte per key. PEER is another node's `dram`."""
TIER_NAMES = ("absent", "dram", "peer", "disk", "remote")

SaveOutcome = Literal["stored", "present", "dropped", "refused"]
"""`stored`; `present`: was there already; `dropped`: too many bytes in flight, no room, or over the tenant's quota;
`refused`: the header does not fit the payload or the connection."""

LoadOutcome = Literal["loaded", "missing", "corrupt", "late"]
"""`late`: not there within the request's time limit."""


class Register(msgspec.Struct, frozen=True, tag="register"):
    """First message of a connection. The answer is `Registered`, or the connection ends."""

    version: int
    engine: str
    """Replica id, for people."""
    identity: Key
    """Digest of the engine's identity (`cache_store.keys.EngineIdentity`)."""
    rank: Annotated[int, Meta(ge=-1, le=2**16)] = -1
    """Tensor-parallel rank of a worker; -1 for the scheduler half, which has no staging area."""
    world_size: Ranks = 1
    slots: Natural = 0
    slot_bytes: Natural = 0


class Registered(msgspec.Struct, frozen=True, tag="registered"):
    node: str
    """Ray node id of the actor."""


class Source(msgspec.Struct, frozen=True, array_like=True):
    """Part of a router's plan: chunks [first, first + count) are in the dram of another node's actor."""

    node: str
    first: Natural
    count: Natural


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """Which of these chunks can be loaded? The answer is `Found`.

    The leading run that is there is leased: not evicted until `Release`, the connection's end, or `lease_s`.
    Chunks on disk, remote or at a peer begin to move to this node's dram at once.
    """

    id: Id
    keys: Annotated[bytes, Meta(max_length=MAX_KEYS * KEY_BYTES)]
    """Chunk keys of a prompt, in order, concatenated."""
    world_size: Ranks
    """Ranks of which a part must be there for a chunk to count."""
    sources: Annotated[tuple[Source, ...], Meta(max_length=MAX_SOURCES)] = ()
    lease_s: Seconds = 60.0


class Found(msgspec.Struct, frozen=True, tag="found"):
    id: Id
    tiers: bytes
    """One byte per key asked: ABSENT, DRAM, PEER, DISK or REMOTE."""
    bytes_per_chunk: int
    """Of the longest leading chunk found, all ranks together; 0 when none was."""
    lease: int
    """0 when nothing was leased."""
    seconds: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    """Measured seconds per byte by tier code; 0 for never measured."""


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The lease is no longer needed. No answer."""

    lease: int


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Put this rank's part of a chunk into a slot. The answer is `Loaded`."""

    id: Id
    key: Key
    slot: Natural
    limit_s: Seconds = 10.0


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The bytes in the slot are as they came from the tier: the engine checks length and checksum of `header`."""

    id: Id
    outcome: LoadOutcome
    tier: Annotated[int, Meta(ge=ABSENT, le=REMOTE)] = ABSENT
    header: Header | None = None


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Keep the part that is in the slot. The answer is `Saved`, after which the slot is the engine's again."""

    id: Id
    header: Header
    slot: Natural


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    id: Id
    outcome: SaveOutcome


class Corrupt(msgspec.Struct, frozen=True, tag="corrupt"):
    """The engine found that a loaded part is not what its header says: drop the chunk. No answer."""

    key: Key
    tier: Annotated[int, Meta(ge=ABSENT, le=REMOTE)]


M = TypeVar("M")
Request = Register | Lookup | Release | Load | Save | Corrupt
Answer = Registered | Found | Loaded | Saved

_encoder = msgspec.msgpack.Encoder()


def encode(message: Request | Answer) -> bytes:
    payload = _encoder.encode(message)
    return len(payload).to_bytes(4, "little") + payload


class MessageReader(Generic[M]):
    """Cuts a byte stream into messages of one direction: `MessageReader(Request)` or `MessageReader(Answer)`."""

    def __init__(self, kind: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[M]:
        """Raises ProtocolError for a message that is too long or does not decode."""
        self._buffer += data
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "little")
            if length > self._max_bytes:
                raise ProtocolError(f"message of {length} bytes: the limit is {self._max_bytes}")
            if len(self._buffer) < 4 + length:
                return
            payload = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            try:
                message = self._decoder.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"undecodable message: {error}") from error
            yield message
