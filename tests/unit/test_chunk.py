"""Chunk parts: what was written is read, and no other bytes are ever taken for a part."""

from __future__ import annotations

import random
import struct
from typing import Any

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.chunk import (
    FORMAT_VERSION,
    MAGIC,
    MAX_HEAD_BYTES,
    MAX_HEADER_BYTES,
    ChunkError,
    Header,
    check_header,
    checksum,
    encode_head,
    read_head,
    verify,
)

PAYLOAD = random.Random(5).randbytes(3 * 2 * 32)


def make_header(payload: bytes = PAYLOAD, **changes: Any) -> Header:
    fields = {
        "key": b"k" * 32,
        "parent": b"p" * 32,
        "identity": b"i" * 32,
        "rank": 1,
        "world_size": 2,
        "tokens": 256,
        "dtype": "bfloat16",
        "shape": (3, 2, 32),
        "nbytes": len(payload),
        "checksum": checksum(payload),
        "created": 1_786_000_000.25,
        "tenant": "acme",
        "cost_s": 0.125,
    }
    return Header(**{**fields, **changes})


def check(header: Header, payload: bytes | bytearray | memoryview, **asked: Any) -> None:
    """Verify against what `make_header` writes, but for `asked`."""
    wanted = {"key": b"k" * 32, "identity": b"i" * 32, "rank": 1, "world_size": 2}
    verify(header, payload, **{**wanted, **asked})


def read_part(data: bytes) -> bytes:
    """The payload of a whole file, as a reader gets it."""
    header, offset = read_head(data)
    check(header, data[offset:])
    return data[offset:]


def sealed(header: bytes, version: int = FORMAT_VERSION, length: int | None = None) -> bytes:
    """A head whose own checksum is right, whatever it holds."""
    preamble = struct.pack("<7sBI", MAGIC, version, len(header) if length is None else length)
    return preamble + xxhash.xxh3_64_digest(preamble + header) + header


digests = st.binary(min_size=32, max_size=32)
world_sizes = st.integers(1, 64)
headers = world_sizes.flatmap(
    lambda world_size: st.builds(
        Header,
        key=digests,
        parent=digests,
        identity=digests,
        rank=st.integers(0, world_size - 1),
        world_size=st.just(world_size),
        tokens=st.integers(1, 2**40),
        dtype=st.text(max_size=20),
        shape=st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
        nbytes=st.integers(0, 2**50),
        checksum=st.binary(min_size=16, max_size=16),
        created=st.floats(allow_nan=False, allow_infinity=False),
        tenant=st.text(max_size=100),
        cost_s=st.floats(min_value=0, allow_infinity=False),
    )
)


@given(header=headers, payload=st.binary(max_size=100))
def test_a_header_is_read_as_it_was_written_and_the_payload_begins_behind_it(
    header: Header, payload: bytes
) -> None:
    data = encode_head(header) + payload
    found, offset = read_head(data)
    assert found == header
    assert data[offset:] == payload


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(data).cast("H")])
def test_parts_are_read_from_any_buffer(kind: Any) -> None:
    head = encode_head(make_header())
    head += b"\0" * (len(head) % 2)
    assert read_head(kind(head)).header == make_header()
    assert checksum(kind(PAYLOAD)) == checksum(PAYLOAD)
    check(make_header(), kind(PAYLOAD))


def test_the_checksum_is_the_one_that_the_format_names() -> None:
    assert checksum(PAYLOAD) == xxhash.xxh3_128(PAYLOAD).intdigest().to_bytes(16, "big")
    assert checksum(b"").hex() == "99aa06d3014798d86001c324468d497f"


def test_the_bytes_of_a_head_are_those_of_the_format() -> None:
    head = encode_head(make_header())
    assert head[:8] == b"MANTAKV\x01"
    (length,) = struct.unpack_from("<I", head, 8)
    assert len(head) == 12 + 8 + length
    assert head == sealed(msgspec.msgpack.encode(make_header()))


def test_any_flipped_bit_of_a_part_is_found() -> None:
    part = encode_head(make_header()) + PAYLOAD
    assert read_part(part) == PAYLOAD
    for bit in range(8 * len(part)):
        damaged = bytearray(part)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChunkError):
            read_part(bytes(damaged))


def test_a_part_cut_off_anywhere_is_torn_and_one_with_bytes_behind_it_is_refused() -> None:
    part = encode_head(make_header()) + PAYLOAD
    for length in range(len(part)):
        with pytest.raises(ChunkError) as raised:
            read_part(part[:length])
        assert raised.value.fault in ("torn", "length")
    with pytest.raises(ChunkError, match="payload of 193 bytes; the header says 192"):
        read_part(part + b"\0")


@given(data=st.binary(max_size=300) | st.binary(max_size=200).map(lambda rest: MAGIC + b"\x01" + rest))
def test_foreign_bytes_raise_nothing_but_a_chunk_error(data: bytes) -> None:
    with pytest.raises(ChunkError):
        read_head(data)


@settings(max_examples=300)
@given(
    body=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(Header.__struct_fields__), inner),
    ).map(msgspec.msgpack.encode)
)
def test_a_sealed_head_that_holds_no_header_raises_nothing_but_a_chunk_error(body: bytes) -> None:
    with pytest.raises(ChunkError):
        read_head(sealed(body))


@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 60_000 + b"\xc0",
        b"\x81\xa1x" + b"\x91" * 60_000 + b"\xc0",
        b"\x81\xa6dtype\xff\xa1x",
        msgspec.msgpack.encode(make_header()) + b"\xc0",
    ],
    ids=["nested deeply", "an unknown field nested deeply", "not UTF-8", "something behind it"],
)
def test_a_header_made_to_break_the_decoder_raises_a_chunk_error(body: bytes) -> None:
    with pytest.raises(ChunkError, match="does not decode"):
        read_head(sealed(body))


def test_a_header_is_bounded_for_writers_and_readers() -> None:
    with pytest.raises(ChunkError, match=f"the limit is {MAX_HEADER_BYTES}"):
        encode_head(make_header(tenant="x" * MAX_HEADER_BYTES))
    with pytest.raises(ChunkError, match=f"header of 4294967295 bytes, and the limit is {MAX_HEADER_BYTES}"):
        read_head(sealed(b"", length=2**32 - 1))
    longest = make_header(tenant="x" * (MAX_HEADER_BYTES - len(encode_head(make_header(tenant=""))) + 18))
    head = encode_head(longest)
    assert len(head) == MAX_HEAD_BYTES
    assert read_head(head + PAYLOAD[:1]).header == longest


def test_another_format_version_is_told_from_damage() -> None:
    body = msgspec.msgpack.encode(make_header())
    with pytest.raises(ChunkError, match="format version 2; needed: 1") as raised:
        read_head(sealed(body, version=2))
    assert raised.value.fault == "version"
    with pytest.raises(ChunkError, match="header of version 2; needed: 1"):
        read_head(sealed(msgspec.msgpack.encode(make_header(version=2))))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"key": b"k" * 31}, "key in a chunk header has 31 bytes"),
        ({"parent": b""}, "parent in a chunk header has 0 bytes"),
        ({"identity": b"i" * 33}, "identity in a chunk header has 33 bytes"),
        ({"checksum": b"c"}, "checksum in a chunk header has 1 bytes"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"rank": -1}, "rank -1 of 2"),
        ({"rank": 0, "world_size": 0}, "rank 0 of 0"),
        ({"nbytes": -1}, "-1 payload bytes"),
        ({"tokens": 0}, "header of 0 tokens"),
        ({"shape": (1, -1)}, "shape"),
        ({"created": float("nan")}, "created nan"),
        ({"cost_s": float("inf")}, "cost_s inf"),
        ({"cost_s": -1.0}, "cost_s -1"),
        ({"version": 0}, "version 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_header_that_no_part_can_have_is_refused_everywhere(changes: dict[str, Any], named: str) -> None:
    header = make_header(**changes)
    for refuse in (
        lambda: check_header(header),
        lambda: encode_head(header),
        lambda: read_head(sealed(msgspec.msgpack.encode(header))),
        lambda: check(header, PAYLOAD),
    ):
        with pytest.raises(ChunkError, match=named):
            refuse()


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"key": b"q" * 32}, f"key {b'k'.hex() * 32}; asked for: {b'q'.hex() * 32}"),
        ({"identity": b"q" * 32}, f"identity {b'i'.hex() * 32}; asked for"),
        ({"rank": 0}, "rank 1 of 2; asked for: 0 of 2"),
        ({"world_size": 4}, "rank 1 of 2; asked for: 1 of 4"),
    ],
    ids=["key", "identity", "rank", "world size"],
)
def test_a_sound_part_of_something_else_is_refused_and_said_what_differs(
    asked: dict[str, Any], named: str
) -> None:
    with pytest.raises(ChunkError, match=named) as raised:
        check(make_header(), PAYLOAD, **asked)
    assert raised.value.fault == "mismatch"


@pytest.mark.parametrize(
    ("payload", "fault"),
    [(PAYLOAD[:-1], "length"), (PAYLOAD + b"\0", "length"), (b"", "length"), (PAYLOAD[::-1], "checksum")],
)
def test_a_payload_that_is_not_the_headers_is_refused(payload: bytes, fault: str) -> None:
    with pytest.raises(ChunkError, match="the header says") as raised:
        check(make_header(), payload)
    assert raised.value.fault == fault


def test_a_part_may_be_empty() -> None:
    header = make_header(payload=b"")
    check(read_head(encode_head(header)).header, b"")
