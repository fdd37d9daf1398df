"""The codec of the messages between an engine and its cache actor."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.chunk import Header
from cache_store.events import ProtocolError
from cache_store.wire import (
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    MAX_SECONDS,
    Answer,
    Corrupt,
    Found,
    Load,
    Loaded,
    Lookup,
    MessageReader,
    Register,
    Registered,
    Release,
    Request,
    Save,
    Saved,
    Source,
    encode,
)

numbers = st.integers(0, 2**63 - 1)
keys = st.binary(min_size=32, max_size=32)
ranks = st.integers(1, 2**16)
seconds = st.floats(1e-6, MAX_SECONDS)
headers = st.builds(
    Header,
    key=keys,
    parent=keys,
    identity=keys,
    rank=numbers,
    world_size=ranks,
    tokens=numbers,
    dtype=st.text(),
    shape=st.lists(numbers, max_size=3).map(tuple),
    nbytes=numbers,
    checksum=st.binary(min_size=16, max_size=16),
    created=st.floats(0, 1e10),
    tenant=st.text(),
    cost_s=st.floats(0, 1e6),
)
requests: st.SearchStrategy[Request] = st.one_of(
    st.builds(
        Register,
        version=numbers,
        engine=st.text(),
        identity=keys,
        rank=st.integers(-1, 2**16),
        world_size=ranks,
        slots=numbers,
        slot_bytes=numbers,
    ),
    st.builds(
        Lookup,
        id=numbers,
        keys=st.binary(max_size=200),
        world_size=ranks,
        sources=st.lists(st.builds(Source, st.text(), numbers, numbers), max_size=3).map(tuple),
        lease_s=seconds,
    ),
    st.builds(Release, lease=numbers),
    st.builds(Load, id=numbers, key=keys, slot=numbers, limit_s=seconds),
    st.builds(Save, id=numbers, header=headers, slot=numbers),
    st.builds(Corrupt, key=keys, tier=st.integers(0, 4)),
)
answers: st.SearchStrategy[Answer] = st.one_of(
    st.builds(Registered, node=st.text()),
    st.builds(
        Found,
        id=numbers,
        tiers=st.binary(max_size=9),
        bytes_per_chunk=numbers,
        lease=numbers,
        seconds=st.tuples(*[st.floats(0, 1)] * 5),
    ),
    st.builds(
        Loaded,
        id=numbers,
        outcome=st.sampled_from(["loaded", "missing", "corrupt", "late"]),
        tier=st.integers(0, 4),
        header=st.none() | headers,
    ),
    st.builds(Saved, id=numbers, outcome=st.sampled_from(["stored", "present", "dropped", "refused"])),
)


def read(kind: Any, data: bytes) -> list[Any]:
    reader: MessageReader[Any] = MessageReader(kind)
    return list(reader.feed(data))


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


@pytest.mark.parametrize(
    ("kind", "messages"), [(Request, requests), (Answer, answers)], ids=["requests", "answers"]
)
def test_messages_survive_any_cut_of_the_stream(kind: Any, messages: st.SearchStrategy[Any]) -> None:
    @given(st.lists(messages, max_size=6), st.lists(st.integers(1, 40), max_size=40))
    def check(sent: list[Any], cuts: list[int]) -> None:
        data = b"".join(encode(message) for message in sent)
        reader: MessageReader[Any] = MessageReader(kind)
        received, start = [], 0
        for length in [*cuts, len(data)]:
            received += reader.feed(data[start : start + length])
            start += length
        assert received == sent

    check()


def test_the_form_on_the_wire_is_pinned() -> None:
    assert encode(Load(7, b"a" * 32, 3, 1.0)) == (
        b"\x4c\x00\x00\x00\x85\xa4type\xa4load\xa2id\x07\xa3key\xc4\x20"
        + b"a" * 32
        + b"\xa4slot\x03\xa7limit_s\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00"
    )


@pytest.mark.parametrize("kind", [Request, Answer], ids=["requests", "answers"])
def test_garbage_is_a_protocol_error_or_waits_for_more(kind: Any) -> None:
    @given(st.binary(max_size=300))
    def check(data: bytes) -> None:
        for stream in (data, frame(data)):
            try:
                read(kind, stream)
            except ProtocolError:
                continue

    check()


@given(requests, st.lists(st.tuples(st.integers(4, 500), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_message_is_a_message_or_a_protocol_error(
    message: Request, damage: list[tuple[int, int]]
) -> None:
    data = bytearray(encode(message))
    for position, value in damage:
        if position < len(data):
            data[position] = value
    try:
        received = read(Request, bytes(data))
    except ProtocolError:
        return
    assert len(received) == 1
    assert isinstance(received[0], Request)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"\x81\xa4type\xa5other",
        b"\x91" * 100_000,
        b"\x83\xa4type\xa7release\xa5lease\x01\xa1x" + b"\x91" * 100_000 + b"\x01",
        b"\x84\xa4type\xa6lookup\xa2id\x01\xa4keys\xc4\x00\xa7sources\xdd\xff\xff\xff\xff",
        encode(Register(1, "name", bytes(32)))[4:].replace(b"name", b"na\xff\xfe"),
        encode(Release(1))[4:] + b"\x00",
        encode(Registered("n"))[4:],
    ],
    ids=[
        "empty",
        "not msgpack",
        "no type",
        "unknown type",
        "nested",
        "nested in an unknown field",
        "four billion sources",
        "no UTF-8",
        "trailing byte",
        "of the other direction",
    ],
)
def test_a_message_that_does_not_decode_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="undecodable"):
        read(Request, frame(payload))


KEY = bytes(32)


@pytest.mark.parametrize(
    "message",
    [
        Load(-1, KEY, 0),
        Load(2**63, KEY, 0),
        Load(1, KEY, -1),
        Load(1, KEY[:31], 0),
        Load(1, KEY + b"x", 0),
        *(Load(1, KEY, 0, limit) for limit in (0.0, -1.0, math.nan, math.inf, MAX_SECONDS + 1)),
        Lookup(1, KEY, 0),
        Lookup(1, KEY, 1, lease_s=math.nan),
        Lookup(1, bytes(32 * (MAX_KEYS + 1)), 1),
        Lookup(1, KEY, 1, sources=(Source("n", -1, 1),)),
        Register(1, "e", b"short"),
        Register(1, "e", KEY, rank=-2),
        Register(1, "e", KEY, world_size=0),
        Register(1, "e", KEY, slots=-1),
        Corrupt(KEY, 5),
        Corrupt(KEY, -1),
    ],
    ids=lambda message: str(message)[:60],
)
def test_a_value_that_cannot_be_is_a_protocol_error(message: Request) -> None:
    with pytest.raises(ProtocolError, match="undecodable"):
        read(Request, encode(message))


def test_the_longest_look_up_passes() -> None:
    message = Lookup(1, bytes(32 * MAX_KEYS), 1)
    assert read(Request, encode(message)) == [message]


def test_a_message_over_the_limit_is_refused_before_it_has_come() -> None:
    with pytest.raises(ProtocolError, match=rf"{MAX_MESSAGE_BYTES + 1} bytes"):
        read(Request, (MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))


def test_a_field_of_a_later_version_is_ignored() -> None:
    fields = msgspec.msgpack.decode(encode(Release(5))[4:])
    assert read(Request, frame(msgspec.msgpack.encode({**fields, "new": 1}))) == [Release(5)]
