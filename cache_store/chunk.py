"""A chunk part: header and payload, as bytes that any node can verify.

A part is what one tensor-parallel rank holds of a chunk: the engine's blocks of all layers as one buffer of opaque
bytes. In memory header and payload travel apart; in a file they stand one behind the other:

    magic "MANTAKV", 7 bytes | format version, 1 byte | header length, uint32 LE
    | xxh3-64 of the 12 bytes before it and of the header, 8 bytes, big-endian | header, msgpack | payload

The head has a checksum of its own because not all of a header shows in the payload: a flipped bit in `cost_s` or
`tenant` would be believed.
"""

from __future__ import annotations

import math
import struct
from typing import Literal, NamedTuple

import msgspec
import xxhash

from cache_store.events import KEY_BYTES

FORMAT_VERSION = 1
MAGIC = b"MANTAKV"
CHECKSUM_BYTES = 16
MAX_HEADER_BYTES = 64 * 1024

_PREAMBLE = struct.Struct("<7sBI")
_SEAL_BYTES = 8

MAX_HEAD_BYTES = _PREAMBLE.size + _SEAL_BYTES + MAX_HEADER_BYTES
"""Where a payload begins at the latest: whoever reads so much of a file has its head."""

Bytes = bytes | bytearray | memoryview
"""C-contiguous, of any item type."""

Fault = Literal["torn", "foreign", "version", "length", "checksum", "mismatch"]
"""Why a part can't be used, for counters.

`torn`: cut off or damaged; `foreign`: no part of Manta's; `version`: of a format that is not read here; `length`,
`checksum`: the payload is not the header's; `mismatch`: a sound part, but not the one asked for.
"""


class ChunkError(ValueError):
    """Bytes that are not the part that was asked for, or no part at all. They must not be used."""

    def __init__(self, message: str, fault: Fault = "torn") -> None:
        super().__init__(message)
        self.fault = fault


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one part. Everything but `created` and `cost_s` is checked before a payload is used."""

    key: bytes
    """Chunk key, 32 bytes."""
    parent: bytes
    """Key of the chunk before it; the namespace (`cache_store.keys.namespace`) for the first chunk."""
    identity: bytes
    """Digest of the engine identity."""
    rank: int
    world_size: int
    tokens: int
    """Tokens in the chunk."""
    dtype: str
    """Of the KV as stored."""
    shape: tuple[int, ...]
    """(blocks, layers, bytes of one layer's block)."""
    nbytes: int
    """Payload bytes."""
    checksum: bytes
    """xxh3-128 of the payload, 16 bytes, big-endian."""
    created: float
    """Seconds since the epoch."""
    tenant: str = ""
    """Whose quota it counts against; empty for none."""
    cost_s: float = 0.0
    """Seconds that computing it took, or would take again; 0 for unknown."""
    version: int = FORMAT_VERSION


class Head(NamedTuple):
    """What stands before a payload."""

    header: Header
    payload_offset: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def checksum(payload: Bytes) -> bytes:
    """xxh3-128, 16 bytes, big-endian. Large buffers are read without the GIL."""
    return xxhash.xxh3_128_digest(payload)


def check_header(header: Header) -> None:
    """Raises ChunkError for values that no part can have, whatever its payload is."""
    if header.version != FORMAT_VERSION:
        raise ChunkError(f"chunk header of version {header.version}; needed: {FORMAT_VERSION}", "version")
    for name, value in (("key", header.key), ("parent", header.parent), ("identity", header.identity)):
        if len(value) != KEY_BYTES:
            raise ChunkError(f"{name} in a chunk header has {len(value)} bytes; needed: {KEY_BYTES}")
    if len(header.checksum) != CHECKSUM_BYTES:
        raise ChunkError(
            f"checksum in a chunk header has {len(header.checksum)} bytes; needed: {CHECKSUM_BYTES}"
        )
    if not 0 <= header.rank < header.world_size:
        raise ChunkError(f"rank {header.rank} of {header.world_size} in a chunk header")
    if header.nbytes < 0 or header.tokens < 1 or any(size < 0 for size in header.shape):
        raise ChunkError(
            f"chunk header of {header.tokens} tokens, shape {header.shape} and {header.nbytes} payload bytes"
        )
    if not (math.isfinite(header.created) and math.isfinite(header.cost_s) and header.cost_s >= 0):
        raise ChunkError(f"chunk header with created {header.created} and cost_s {header.cost_s}")


def encode_head(header: Header) -> bytes:
    """What a file has before its payload. Raises ChunkError for a header that no reader would accept."""
    check_header(header)
    data = _encoder.encode(header)
    if len(data) > MAX_HEADER_BYTES:
        raise ChunkError(f"chunk header of {len(data)} bytes: the limit is {MAX_HEADER_BYTES}")
    preamble = _PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(data))
    return preamble + _seal(preamble, data) + data


def read_head(buffer: Bytes) -> Head:
    """Header of a part and where its payload begins.

    `buffer` starts where the part starts; MAX_HEAD_BYTES of it, or all there is, always suffice, and the payload
    need not be in it. Raises ChunkError, and nothing else, for bytes that `encode_head` did not write.
    """
    view = memoryview(buffer).cast("B")
    start = _PREAMBLE.size + _SEAL_BYTES
    magic = bytes(view[: len(MAGIC)])
    if not MAGIC.startswith(magic):
        raise ChunkError(f"no chunk: it begins with {magic!r}, not with {MAGIC!r}", "foreign")
    if len(view) < start:
        raise ChunkError(f"torn chunk: {len(view)} bytes, and its head has {start} before the header")
    preamble = bytes(view[: _PREAMBLE.size])
    _, version, length = _PREAMBLE.unpack(preamble)
    if version != FORMAT_VERSION:
        raise ChunkError(f"chunk of format version {version}; needed: {FORMAT_VERSION}", "version")
    if length > MAX_HEADER_BYTES:
        raise ChunkError(f"torn chunk: a header of {length} bytes, and the limit is {MAX_HEADER_BYTES}")
    data = bytes(view[start : start + length])
    if len(data) < length:
        raise ChunkError(f"torn chunk: {len(data)} of {length} header bytes are there")
    if _seal(preamble, data) != bytes(view[_PREAMBLE.size : start]):
        raise ChunkError("torn chunk: the checksum of its head differs")
    header = _decode(data)
    check_header(header)
    return Head(header, start + length)


def verify(
    header: Header, payload: Bytes, *, key: bytes, identity: bytes, rank: int, world_size: int
) -> None:
    """Raises ChunkError naming what differs unless `payload` is the asked part, byte for byte."""
    check_header(header)
    for name, found, asked in (("key", header.key, key), ("identity", header.identity, identity)):
        if found != asked:
            raise ChunkError(f"chunk of {name} {found.hex()}; asked for: {asked.hex()}", "mismatch")
    if (header.rank, header.world_size) != (rank, world_size):
        raise ChunkError(
            f"chunk part of rank {header.rank} of {header.world_size}; asked for: {rank} of {world_size}",
            "mismatch",
        )
    nbytes = memoryview(payload).nbytes
    if nbytes != header.nbytes:
        raise ChunkError(f"payload of {nbytes} bytes; the header says {header.nbytes}", "length")
    found = checksum(payload)
    if found != header.checksum:
        raise ChunkError(
            f"payload with checksum {found.hex()}; the header says {header.checksum.hex()}", "checksum"
        )


def _seal(preamble: bytes, data: bytes) -> bytes:
    return xxhash.xxh3_64_digest(preamble + data)


def _decode(data: bytes) -> Header:
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ChunkError(f"chunk header does not decode: {error}") from error
