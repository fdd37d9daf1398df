"""Messages of the event stream: what a holder of KV chunks tells every router.

A holder (a replica, later a node's cache actor) sends one ordered stream. It starts with a `Hello`, goes on
with a `Snapshot` for every tier that it owns, and then sends numbered `Delta`s, with a load report among them.
Deltas of one holder are numbered 1, 2, 3, ... across its tiers; a `Snapshot` carries the number of the last
delta that it includes. A gap in the numbers means that a delta was lost: take a snapshot.

On the wire each message is one frame: a little-endian uint32 length, then msgpack. Decoding is strict: what does
not decode raises `ProtocolError` and the connection is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, NewType

import msgspec

PROTOCOL_VERSION = 1
KEY_BYTES = 32
MAX_FRAME_BYTES = 256 * 1024 * 1024
MAX_SHARES = 64
"""Routers that a load report tells apart."""

Tier = Literal["hbm", "dram", "disk", "remote"]
ChunkKey = NewType("ChunkKey", bytes)
"""32 bytes that name a chunk's content and everything that its KV depends on; see `cache_store.keys`."""


class ProtocolError(ValueError):
    """Bytes from a peer that are not a message of this protocol."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of every stream."""

    version: int
    holder: str
    """Id of the replica or cache actor."""
    epoch: int
    """Random per start of the holder: another epoch is another life, with nothing of the old one left."""
    identity: bytes
    """Digest of all that KV depends on except tokens, adapter and salt (`cache_store.keys.EngineIdentity`)."""
    chunk_tokens: int
    """Tokens per chunk."""


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """All chunks of one tier, as of delta number `seq`."""

    seq: int
    tier: Tier
    keys: bytes
    """Chunk keys, concatenated."""


class Delta(msgspec.Struct, frozen=True, tag="delta"):
    """One change of one tier. `removed` applies before `added`; `cleared` before both."""

    seq: int
    tier: Tier
    added: bytes = b""
    removed: bytes = b""
    cleared: bool = False


Count = Annotated[int, msgspec.Meta(ge=0)]


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What of a replica's open requests came through one router. It is gone with the last of them."""

    router: Annotated[str, msgspec.Meta(max_length=64)]
    """The router's id, another one in each of its lives."""
    seen: Count = 0
    """The highest number of its reservations that has reached the replica."""
    requests: Count = 0
    prefilling: Count = 0
    """Of `requests`, those without a first token."""
    prefill_tokens: Count = 0
    """Prompt tokens that those have still to compute."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    """What a replica is doing now. Sent at once when a request comes, gets its first token or ends, though at most
    every 50 ms; a few times a second while it is busy, once a second otherwise."""

    waiting: int
    """Requests in the engine that have not started."""
    running: int
    """Requests in the engine that are being processed."""
    prefill_tokens: int
    """Prompt tokens still to be computed for the requests that are open at the replica's own HTTP server."""
    kv_used: float
    """Part of the KV blocks in use, 0 to 1."""
    prefill_rate: float
    """Measured prompt tokens per second while prefilling; 0 when never measured."""
    decode_rate: float
    """Measured output tokens per second of one stream; 0 when never measured."""
    http_requests: int = 0
    """Requests open at the replica's own HTTP server."""
    seq: int = 0
    """Number of the holder's last delta before this report."""
    draining: bool = False
    """True when the replica finishes what it has and must get nothing new."""
    prefilling: Count = 0
    """Of `http_requests`, those without a first token."""
    shares: Annotated[tuple[Share, ...], msgspec.Meta(max_length=MAX_SHARES)] = ()
    """The parts of `http_requests`, `prefilling` and `prefill_tokens` that came through routers. What is left over
    came past them, or through routers that found no place here."""

    def share(self, router: str) -> Share:
        """All zero for a router that has nothing open here."""
        return next((share for share in self.shares if share.router == router), Share(router))


Message = Hello | Snapshot | Delta | Load

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack_keys(keys: Iterable[ChunkKey]) -> bytes:
    return b"".join(keys)


def unpack_keys(data: bytes) -> list[ChunkKey]:
    """Raises ProtocolError when the length is not a whole number of keys."""
    if len(data) % KEY_BYTES:
        raise ProtocolError(f"{len(data)} bytes of chunk keys: expected a multiple of {KEY_BYTES}")
    return [ChunkKey(data[i : i + KEY_BYTES]) for i in range(0, len(data), KEY_BYTES)]


def encode_frame(message: Message) -> bytes:
    payload = _encoder.encode(message)
    return len(payload).to_bytes(4, "little") + payload


class FrameReader:
    """Cuts a byte stream into messages. Feed it what arrives; it yields what is complete."""

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_frame_bytes = max_frame_bytes

    def feed(self, data: bytes) -> Iterator[Message]:
        """Raises ProtocolError for a frame that is too long or does not decode."""
        self._buffer += data
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "little")
            if length > self._max_frame_bytes:
                raise ProtocolError(f"frame of {length} bytes: the limit is {self._max_frame_bytes}")
            if len(self._buffer) < 4 + length:
                return
            payload = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            try:
                message = _decoder.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ProtocolError(f"undecodable frame: {error}") from error
            yield message
