"""The codec of the event stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.events import (
    KEY_BYTES,
    MAX_SHARES,
    ChunkKey,
    Delta,
    FrameReader,
    Hello,
    Load,
    Message,
    ProtocolError,
    Share,
    Snapshot,
    encode_frame,
    pack_keys,
    unpack_keys,
)

numbers = st.integers(0, 2**63 - 1)
tiers = st.sampled_from(["hbm", "dram", "disk", "remote"])
keys = st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=4).map(b"".join)
rates = st.floats(0, 1e9)
shares = st.builds(
    Share, st.text(max_size=64), seen=numbers, requests=numbers, prefilling=numbers, prefill_tokens=numbers
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Hello, version=numbers, holder=st.text(), epoch=numbers, identity=st.binary(), chunk_tokens=numbers
    ),
    st.builds(Snapshot, seq=numbers, tier=tiers, keys=keys),
    st.builds(Delta, seq=numbers, tier=tiers, added=keys, removed=keys, cleared=st.booleans()),
    st.builds(
        Load,
        waiting=numbers,
        running=numbers,
        prefill_tokens=numbers,
        kv_used=rates,
        prefill_rate=rates,
        decode_rate=rates,
        http_requests=numbers,
        draining=st.booleans(),
        prefilling=numbers,
        shares=st.lists(shares, max_size=3).map(tuple),
    ),
)


@given(st.lists(messages, max_size=6), st.lists(st.integers(1, 40), max_size=40))
def test_messages_survive_any_cut_of_the_stream(sent: list[Message], cuts: list[int]) -> None:
    data = b"".join(encode_frame(message) for message in sent)
    reader, received, start = FrameReader(), [], 0
    for length in [*cuts, len(data)]:
        received += reader.feed(data[start : start + length])
        start += length
    assert received == sent


def test_the_form_on_the_wire_is_pinned() -> None:
    delta = Delta(7, "hbm", added=b"a" * 32)
    assert encode_frame(delta) == (
        b"\x55\x00\x00\x00\x86\xa4type\xa5delta\xa3seq\x07\xa4tier\xa3hbm\xa5added\xc4\x20"
        + b"a" * 32
        + b"\xa7removed\xc4\x00\xa7cleared\xc2"
    )


@given(st.binary(min_size=4, max_size=300))
def test_garbage_is_a_protocol_error_or_waits_for_more(data: bytes) -> None:
    reader = FrameReader(max_frame_bytes=1024)
    try:
        received = list(reader.feed(data))
    except ProtocolError:
        return
    assert all(isinstance(message, Hello | Snapshot | Delta | Load) for message in received)
    assert len(data) < 4 + int.from_bytes(data[:4], "little") or received


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x81\xa4type\xa5other",
        b"\x80",
        encode_frame(Snapshot(1, "hbm", b""))[4:].replace(b"\xa3hbm", b"\xa3ram"),
        encode_frame(Snapshot(1, "hbm", b""))[4:] + b"\x00",
    ],
    ids=["empty", "not msgpack", "unknown type", "no type", "unknown tier", "trailing byte"],
)
def test_a_frame_that_does_not_decode_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="undecodable"):
        list(FrameReader().feed(len(payload).to_bytes(4, "little") + payload))


def test_a_frame_over_the_limit_is_refused_before_it_has_come() -> None:
    with pytest.raises(ProtocolError, match=r"101 bytes.*100"):
        list(FrameReader(max_frame_bytes=100).feed((101).to_bytes(4, "little")))


def test_a_field_of_a_later_version_is_ignored() -> None:
    frame = bytearray(encode_frame(Snapshot(1, "hbm", b"")))
    frame[4] += 1
    frame += b"\xa3new\x01"
    frame[:4] = (len(frame) - 4).to_bytes(4, "little")
    assert list(FrameReader().feed(bytes(frame))) == [Snapshot(1, "hbm", b"")]


@given(st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES).map(ChunkKey)))
def test_keys_come_back_as_they_were(given_keys: list[ChunkKey]) -> None:
    assert unpack_keys(pack_keys(given_keys)) == given_keys


def test_keys_cut_short_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="33 bytes"):
        unpack_keys(bytes(33))


@pytest.mark.parametrize(
    "shares",
    [(Share("r", requests=-1),), (Share("r" * 65),), (Share("r"),) * (MAX_SHARES + 1)],
    ids=["a negative count", "a long name", "too many"],
)
def test_shares_that_no_replica_would_tell_are_refused(shares: tuple[Share, ...]) -> None:
    frame = encode_frame(Load(0, 0, 0, 0.0, 0.0, 0.0, shares=shares))
    with pytest.raises(ProtocolError, match="shares"):
        list(FrameReader().feed(frame))


def test_a_router_without_requests_has_an_empty_share() -> None:
    load = Load(0, 0, 0, 0.0, 0.0, 0.0, shares=(Share("a", 7, 1, 1, 90), Share("b", 2, 1)))
    assert load.share("a").prefill_tokens == 90
    assert load.share("c") == Share("c")
