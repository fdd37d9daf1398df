"""Connections to replicas and the pool that keeps them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_replica import RawReplica, RawRequest, replies, until

from router.connection_pool import ConnectionPool
from router.upstream import (
    MAX_HEAD_BYTES,
    Address,
    BadResponse,
    ClosedBeforeHead,
    ClosedMidBody,
    ConnectFailed,
    Connection,
    RawHeaders,
    UpstreamError,
)

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request):
    return request.param()


@pytest.fixture
async def pool() -> AsyncIterator[ConnectionPool]:
    pool = ConnectionPool(max_idle=2, idle_expiry_s=30)
    yield pool
    pool.check_integrity()
    pool.close()
    pool.check_integrity()


class Recorder:
    """A sink that remembers what it was told."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: RawHeaders = []
        self.heads = self.ends = 0
        self.body = b""
        self.error: UpstreamError | None = None

    def on_head(self, status: int, headers: RawHeaders) -> None:
        self.heads += 1
        self.status, self.headers = status, headers

    def on_body(self, chunk: bytes) -> None:
        assert chunk
        self.body += chunk

    def on_end(self) -> None:
        self.ends += 1

    def on_error(self, error: UpstreamError) -> None:
        assert self.error is None
        self.error = error


async def send(connection: Connection, *, head_only: bool = False) -> Recorder:
    """One request; returns when its response has ended or failed."""
    sink = Recorder()
    connection.begin(sink, head_only=head_only)
    connection.write([GET])
    await until(lambda: sink.ends or sink.error, "the end of the response")
    return sink


async def ask(pool: ConnectionPool, *pieces: bytes, head_only: bool = False) -> tuple[Recorder, Connection]:
    async with RawReplica(replies(*pieces)) as replica:
        connection = await pool.connect(replica.address, 5)
        sink = await send(connection, head_only=head_only)
        pool.release(connection)
        pool.check_integrity()
        return sink, connection


async def test_response_is_told_once_and_whole(pool):
    sink, _ = await ask(pool, OK)
    assert (sink.heads, sink.status, sink.body, sink.ends, sink.error) == (1, 200, b"ok", 1, None)


async def test_header_names_come_in_lower_case_and_trailers_are_no_headers(pool):
    sink, _ = await ask(
        pool,
        b"HTTP/1.1 200 OK\r\nX-One: 1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX-Late: 2\r\n\r\n",
    )
    assert sink.headers == [(b"x-one", b"1"), (b"transfer-encoding", b"chunked")]
    assert sink.body == b"ok"


async def test_informational_responses_are_skipped(pool):
    sink, _ = await ask(pool, b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 H\r\nlink: a\r\n\r\n" + OK)
    assert (sink.heads, sink.status, sink.headers) == (1, 200, [(b"content-length", b"2")])


@pytest.mark.parametrize("length", [b"", b"content-length: 7\r\n", b"transfer-encoding: chunked\r\n"])
async def test_head_request_has_no_body_whatever_its_response_announces(pool, length):
    sink, _ = await ask(pool, b"HTTP/1.1 200 OK\r\n" + length + b"\r\n", head_only=True)
    assert (sink.status, sink.body, sink.ends) == (200, b"", 1)


@pytest.mark.parametrize("status", [b"204", b"304"])
async def test_status_without_body_ends_at_its_head(pool, status):
    sink, _ = await ask(pool, b"HTTP/1.1 " + status + b" X\r\n\r\n")
    assert (sink.status, sink.body, sink.ends) == (int(status), b"", 1)


async def test_response_without_length_ends_with_the_connection_and_is_not_reused(pool):
    async def answer(request: RawRequest) -> None:
        await request.write(b"HTTP/1.1 200 OK\r\n\r\nall of ")
        await request.write(b"it")
        request.close()

    async with RawReplica(answer) as replica:
        connection = await pool.connect(replica.address, 5)
        sink = await send(connection)
        pool.release(connection)
        assert (sink.body, sink.error, pool.idle(replica.address)) == (b"all of it", None, 0)


@pytest.mark.parametrize(
    ("sent", "kind", "started"),
    [
        (b"", ClosedBeforeHead, False),
        (b"HTTP/1.1 200 OK\r\ncont", ClosedBeforeHead, True),
        (b"HTTP/1.1 100 Continue\r\n\r\n", ClosedBeforeHead, True),
        (CHUNKED + b"2\r\nok\r\n", ClosedMidBody, True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok", ClosedMidBody, True),
    ],
)
async def test_lost_connection_says_how_far_the_response_had_come(pool, sent, kind, started):
    async def answer(request: RawRequest) -> None:
        if sent:
            await request.write(sent)
        request.close()

    async with RawReplica(answer) as replica:
        sink = await send(await pool.connect(replica.address, 5))
    assert type(sink.error) is kind
    assert sink.error.response_started is started
    assert str(replica.address) in str(sink.error)


@pytest.mark.parametrize(
    "sent",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        CHUNKED + b"nonsense\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x-long: " + b"y" * MAX_HEAD_BYTES,
    ],
    ids=["other protocol", "upgrade", "bad chunk", "endless head"],
)
async def test_bytes_that_are_no_response_are_a_bad_response(pool, sent):
    sink, connection = await ask(pool, sent)
    assert type(sink.error) is BadResponse
    assert sink.error.response_started
    assert connection.closing


async def test_refused_connection_is_told_apart(pool):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectFailed) as failed:
            await pool.connect(Address(*held.getsockname()), 5)
    assert not failed.value.response_started


async def test_connection_is_reused_last_in_first_out_and_bounded(pool):
    async with RawReplica(replies(OK)) as replica:
        connections = [await pool.connect(replica.address, 5) for _ in range(3)]
        for connection in connections:
            assert (await send(connection)).body == b"ok"
            pool.release(connection)
            pool.check_integrity()
        assert pool.idle(replica.address) == 2
        assert connections[2].closing
        assert pool.take(replica.address) is connections[1]
        assert (await send(connections[1])).body == b"ok"
        pool.release(connections[1])
        assert replica.connections == 3


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        OK + OK,
        OK + b"nonsense",
    ],
    ids=["close", "HTTP/1.0", "answer too many", "bytes after the end"],
)
async def test_connection_that_can_not_serve_again_is_not_kept(pool, sent):
    sink, connection = await ask(pool, sent)
    assert (sink.body, sink.ends, sink.error) == (b"ok", 1, None)
    assert connection.closing


async def test_answer_before_the_whole_request_was_taken_is_not_kept(pool):
    async def answer(request: RawRequest) -> None:
        await request.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await asyncio.Event().wait()

    async with RawReplica(answer) as replica:
        connection = await pool.connect(replica.address, 5)
        sink = Recorder()
        connection.begin(sink, head_only=False)
        connection.write([GET, b"x" * (64 << 20)])
        await until(lambda: sink.ends, "the early answer")
        assert sink.status == 413
        assert not connection.reusable
        pool.release(connection)
        assert connection.closing


async def test_unasked_bytes_and_lost_connections_leave_the_pool(pool):
    async def twice(request: RawRequest) -> None:
        await request.write(OK)
        if request.path == "/":
            await asyncio.sleep(0)
            await go_on.wait()
            await request.write(b"nobody asked")

    go_on = asyncio.Event()
    async with RawReplica(twice) as replica, RawReplica(replies(OK)) as other:
        for place in (replica, other):
            connection = await pool.connect(place.address, 5)
            await send(connection)
            pool.release(connection)
            assert pool.idle(place.address) == 1
        go_on.set()
        other.drop_connections()
        await until(lambda: not pool.idle(replica.address), "the talkative one to go")
        await until(lambda: not pool.idle(other.address), "the lost one to go")
        pool.check_integrity()


async def test_idle_connections_expire():
    pool = ConnectionPool(max_idle=2, idle_expiry_s=0.05)
    async with RawReplica(replies(OK)) as replica:
        connection = await pool.connect(replica.address, 5)
        await send(connection)
        pool.release(connection)
        assert pool.idle(replica.address) == 1
        await until(lambda: not pool.idle(replica.address), "the expiry")
        assert connection.closing
        assert pool.take(replica.address) is None
    pool.check_integrity()


async def test_connection_that_ended_before_its_exchange_began_fails_that_exchange(pool):
    async with RawReplica(replies(OK)) as replica:
        connection = await pool.connect(replica.address, 5)
        await until(lambda: replica.connections, "the connection")
        replica.drop_connections()
        await until(lambda: connection.closing, "its end")
        assert type((await send(connection)).error) is ClosedBeforeHead


async def test_forgotten_replica_keeps_no_connection(pool):
    async with RawReplica(replies(OK)) as replica:
        connection = await pool.connect(replica.address, 5)
        await send(connection)
        pool.release(connection)
        pool.forget(replica.address)
        assert connection.closing
        assert pool.take(replica.address) is None


@settings(max_examples=150, deadline=None)
@given(
    chunks=st.lists(st.binary(min_size=1, max_size=40) | st.just(b"\r\n0\r\n\r\n"), max_size=8),
    informational=st.booleans(),
    cuts=st.lists(st.integers(0, 400)),
)
def test_body_is_the_same_however_the_bytes_are_cut(chunks, informational, cuts):
    wire = b"HTTP/1.1 100 C\r\n\r\n" if informational else b""
    wire += CHUNKED + b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"
    at = [0, *sorted(cut for cut in set(cuts) if cut < len(wire)), len(wire)]
    connection, sink = Connection(Address("x", 1)), Recorder()
    connection._transport = FakeTransport()
    connection.begin(sink, head_only=False)
    for start, stop in pairwise(at):
        assert not sink.ends
        if start < stop:
            connection.data_received(wire[start:stop])
    assert (sink.body, sink.heads, sink.ends, sink.error) == (b"".join(chunks), 1, 1, None)
    assert connection.reusable


class FakeTransport:
    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


def test_addresses_parse_and_print():
    assert Address.parse("10.0.0.1:80") == ("10.0.0.1", 80)
    assert Address.parse("[::1]:80") == ("::1", 80)
    assert str(Address("::1", 80)) == "[::1]:80"
    for wrong in ("", "host", ":80", "host:", "host:http"):
        with pytest.raises(ValueError, match="host:port"):
            Address.parse(wrong)
