"""Bytes through the relay: a raw replica, uvicorn around the relay, and a raw client."""

from __future__ import annotations

import asyncio
import pickle
import socket

import pytest
import uvloop
from raw_replica import RawRequest, replies, until
from relay_stack import Client, stack

from router.client import ClientGone, ClientStalled
from router.config import LimitsConfig
from router.relay import Relay
from router.upstream import (
    Address,
    ClosedBeforeHead,
    ClosedMidBody,
    ConnectFailed,
    UpstreamError,
    UpstreamTimeout,
)

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")

EVENT = b"data: " + b"x" * 242 + b"\n\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
END = b"0\r\n\r\n"


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request):
    return request.param()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def test_event_stream_passes_byte_for_byte_without_a_task_per_piece():
    go_on = asyncio.Event()

    async def answer(request: RawRequest) -> None:
        await request.write(SSE + chunk(EVENT))
        await go_on.wait()
        for _ in range(20):
            go_on.clear()
            await request.write(chunk(EVENT))
            await go_on.wait()
        await request.write(END)

    async with stack(answer) as s:
        pieces: list[bytes] = []

        def tap(piece: bytes) -> None:
            pieces.append(piece)
            asyncio.get_running_loop().call_later(0.001, go_on.set)

        s.ingress.tap = tap
        reply = await s.ask()
        assert (reply.status, reply.body, reply.whole) == (200, EVENT * 21, True)
        assert reply.headers[b"content-type"] == b"text/event-stream"
        assert reply.headers[b"x-manta-replica"] == b"r1"
        assert pieces == [EVENT] * 21
        # Start and end belong to the task; all in between went out from the socket's callback.
        assert s.ingress.tasks == [True] + [False] * 20 + [True]
        assert s.exchange.slow_pieces == 0


async def test_json_error_keeps_status_length_and_type():
    bad = b"HTTP/1.1 422 X\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
    async with stack(replies(bad)) as s:
        reply = await s.ask()
        assert (reply.status, reply.body, reply.whole) == (422, b"{}", True)
        assert reply.headers[b"content-length"] == b"2"
        assert reply.headers[b"content-type"] == b"application/json"
        assert s.ingress.tasks == [True], "a whole answer and its end are one piece"


async def test_response_that_comes_byte_by_byte_is_the_same():
    wire = SSE + chunk(EVENT) * 4 + END
    async with stack(replies(*(wire[i : i + 1] for i in range(len(wire))))) as s:
        reply = await s.ask()
        assert (reply.body, reply.whole) == (EVENT * 4, True)


async def test_payload_that_looks_like_the_last_chunk_ends_nothing():
    event = b"data: {}\n\n0\r\n\r\n"
    wire = chunk(event + b"B\n\n")
    cut = wire.index(b"B")
    async with stack(replies(SSE + wire[:cut], wire[cut:], END)) as s:
        reply = await s.ask()
        assert (reply.body, reply.whole) == (event + b"B\n\n", True)


async def test_request_arrives_as_the_client_sent_it():
    async with stack(replies(JSON + b"content-length: 2\r\n\r\n{}")) as s:
        body = b"z" * 300_000
        assert (await s.ask(body=body)).whole
        assert s.request.line == "POST /v1/x HTTP/1.1"
        assert s.request.body == body
        assert ("content-length", "300000") in s.request.headers


async def test_replica_that_dies_mid_stream_truncates_and_never_ends_the_answer():
    async def answer(request: RawRequest) -> None:
        await request.write(SSE + chunk(EVENT) * 3)
        await request.write(chunk(EVENT)[:100])
        await until(lambda: request is not None and seen, "what was sent to arrive")
        request.abort()

    seen: list[bytes] = []
    async with stack(answer) as s:
        s.ingress.tap = seen.append
        reply = await s.ask()
        assert not reply.whole
        assert reply.body.startswith(EVENT * 3)
        assert type(s.ingress.errors[0]) is ClosedMidBody


async def test_sized_answer_that_was_committed_is_truncated_too():
    async def answer(request: RawRequest) -> None:
        await request.write(JSON + b"content-length: 9000\r\n\r\n" + b"x" * 5000)
        await until(lambda: s.ingress.tasks, "a piece to reach the client")
        request.abort()

    async with stack(answer, held_bytes=4096) as s:
        reply = await s.ask()
        assert (reply.body, reply.whole) == (b"x" * 5000, False)


@pytest.mark.parametrize(
    "sent",
    [
        JSON + b"content-length: 10\r\n\r\n12345",
        JSON + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"12345"),
        SSE,
        b"HTTP/1.1 200",
    ],
    ids=["sized", "chunked", "stream without a token", "half a head"],
)
async def test_replica_that_dies_before_commitment_is_not_seen_by_the_client(sent):
    async def answer(request: RawRequest) -> None:
        await request.write(sent)
        request.abort() if b"200 OK" not in sent else request.close()

    async with stack(answer) as s:
        reply = await s.ask()
        assert (reply.status, reply.whole) == (502, True)
        assert isinstance(s.ingress.errors[0], UpstreamError)
        assert s.replica.connections == 1


async def test_answer_larger_than_the_bound_is_streamed():
    go_on = asyncio.Event()

    async def answer(request: RawRequest) -> None:
        await request.write(JSON + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"x" * 5000))
        await go_on.wait()
        await request.write(chunk(b"y" * 100) + END)

    async with stack(answer, held_bytes=4096) as s:
        asking = asyncio.ensure_future(s.ask())
        await until(lambda: s.ingress.tasks, "a piece to reach the client before the end")
        go_on.set()
        reply = await asking
        assert (reply.body, reply.whole) == (b"x" * 5000 + b"y" * 100, True)


async def test_answer_announced_larger_than_the_bound_is_streamed_from_its_first_byte():
    go_on = asyncio.Event()

    async def answer(request: RawRequest) -> None:
        await request.write(JSON + b"content-length: 5000\r\n\r\n" + b"x" * 10)
        await go_on.wait()
        await request.write(b"y" * 4990)

    async with stack(answer, held_bytes=4096) as s:
        asking = asyncio.ensure_future(s.ask())
        await until(lambda: s.ingress.tasks, "a piece to reach the client before the end")
        go_on.set()
        reply = await asking
        assert (reply.body, reply.whole) == (b"x" * 10 + b"y" * 4990, True)


async def test_answer_within_the_bound_is_held_until_it_is_whole():
    go_on = asyncio.Event()

    async def answer(request: RawRequest) -> None:
        await request.write(JSON + b"content-length: 4000\r\n\r\n" + b"x" * 3999)
        await go_on.wait()
        await request.write(b"y")

    seen: list[bytes] = []
    async with stack(answer, held_bytes=4096) as s:
        s.ingress.tap = seen.append
        asking = asyncio.ensure_future(s.ask())
        await until(lambda: seen, "the part to arrive")
        assert not s.ingress.tasks
        go_on.set()
        assert (await asking).body == b"x" * 3999 + b"y"


async def test_connection_is_kept_and_reused():
    async with stack(replies(SSE + chunk(EVENT) + END)) as s:
        for reused in (False, True, True):
            assert (await s.ask()).whole
            assert s.exchange.reused is reused
            s.ingress.relay.pool.check_integrity()
        assert s.replica.connections == 1


async def test_stale_connection_is_replaced_unseen():
    async def answer(request: RawRequest) -> None:
        if len(s.replica.requests) == 2:
            request.abort()
        else:
            await request.write(SSE + chunk(EVENT) + END)

    async with stack(answer) as s:
        assert (await s.ask()).whole
        reply = await s.ask(body=b"again")
        assert (reply.status, reply.body, reply.whole) == (200, EVENT, True)
        assert [r.body for r in s.replica.requests] == [b"{}", b"again", b"again"]
        assert s.replica.connections == 2
        assert not s.exchange.reused


async def test_fresh_connection_that_brings_nothing_is_not_tried_again_here():
    async def answer(request: RawRequest) -> None:
        request.abort()

    async with stack(answer) as s:
        assert (await s.ask()).status == 502
        assert len(s.replica.requests) == 1
        assert type(s.ingress.errors[0]) is ClosedBeforeHead


async def test_reused_connection_that_brought_a_byte_is_not_tried_again_here():
    async def answer(request: RawRequest) -> None:
        await request.write(SSE + chunk(EVENT) + END if len(s.replica.requests) == 1 else b"H")
        if len(s.replica.requests) == 2:
            request.close()

    async with stack(answer) as s:
        assert (await s.ask()).whole
        assert (await s.ask()).status == 502
        assert len(s.replica.requests) == 2
        assert s.ingress.errors[0].response_started


async def test_replica_that_is_not_there_is_a_failed_connection():
    async with stack(replies(b"")) as s:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            s.ingress.address = Address(*held.getsockname())
            assert (await s.ask()).status == 502
        assert type(s.ingress.errors[0]) is ConnectFailed


async def test_slow_client_holds_the_replica_back_and_loses_nothing():
    total = 48 << 20
    piece = chunk(b"x" * 65536)

    async def answer(request: RawRequest) -> None:
        await request.write(SSE)
        for _ in range(total // 65536):
            await request.write(piece)
        await request.write(END)

    async with stack(answer, max_buffered_bytes=65536) as s:
        client = await Client.connect(s.port, receive_buffer=65536)
        client.reader._transport.pause_reading()
        await client.send()
        await until(
            lambda: s.replica.requests and s.request.blocked and s.exchange.paused, "all to stand still"
        )
        # What the replica got rid of lies in socket buffers; here is no more than one read beyond the limit.
        assert s.request.written < total / 2
        assert s.exchange.queued_bytes <= 65536 + 256 * 1024
        client.reader._transport.resume_reading()
        reply = await client.reply()
        assert (len(reply.body), reply.whole) == (total, True)
        assert s.exchange.slow_pieces > 0
        client.close()


async def test_pieces_keep_their_order_when_the_client_stops_and_goes():
    sent = [b"%d\n" % i * 5000 for i in range(400)]

    async def answer(request: RawRequest) -> None:
        await request.write(SSE)
        for data in sent:
            await request.write(chunk(data))
        await request.write(END)

    async with stack(answer, max_buffered_bytes=4096) as s:
        client = await Client.connect(s.port, receive_buffer=8192)
        await client.send()
        reply = await client.reply()
        assert reply.body == b"".join(sent)
        assert reply.whole
        client.close()


async def test_client_that_takes_nothing_is_dropped():
    async def answer(request: RawRequest) -> None:
        await request.write(SSE)
        while True:
            await request.write(chunk(b"x" * 65536))

    async with stack(answer, idle_timeout_s=0.2) as s:
        client = await Client.connect(s.port, receive_buffer=8192)
        client.reader._transport.pause_reading()
        await client.send()
        await until(lambda: s.ingress.errors, "the client to be dropped")
        assert type(s.ingress.errors[0]) is ClientStalled
        await until(lambda: s.request._writer.is_closing(), "the replica to be let go")
        client.close()


@pytest.mark.parametrize("sent", [b"", SSE, SSE + chunk(EVENT), JSON + b"content-length: 10\r\n\r\n12345"])
async def test_client_that_goes_ends_the_replicas_connection(sent):
    async def answer(request: RawRequest) -> None:
        if sent:
            await request.write(sent)
        await request.until_gone()

    async with stack(answer) as s:
        client = await Client.connect(s.port)
        await client.send()
        await until(lambda: s.replica.requests, "the request")
        client.writer.transport.abort()
        await until(lambda: s.request.connection_gone, "the replica to hear of it")
        await until(lambda: s.ingress.errors, "the exchange to end")
        assert type(s.ingress.errors[0]) is ClientGone
        assert s.ingress.relay.pool.idle(s.replica.address) == 0


async def test_client_that_goes_while_it_is_slow_ends_the_replicas_connection():
    async def answer(request: RawRequest) -> None:
        await request.write(SSE)
        while True:
            await request.write(chunk(b"x" * 65536))

    async with stack(answer) as s:
        client = await Client.connect(s.port, receive_buffer=8192)
        client.reader._transport.pause_reading()
        await client.send()
        await until(lambda: s.ingress.exchanges and s.exchange.paused, "the replica to be held back")
        client.writer.transport.abort()
        await until(lambda: s.request._writer.is_closing(), "the replica to hear of it")
        await until(lambda: s.ingress.errors, "the exchange to end")


async def test_close_aborts_the_connection_before_it_returns():
    async def answer(request: RawRequest) -> None:
        await request.until_gone()

    async with stack(answer) as s:
        exchange = s.ingress.relay.exchange(SCOPE, b"", s.replica.address)
        starting = asyncio.ensure_future(exchange.start())
        await until(lambda: s.replica.requests, "the request")
        connection = exchange._connection
        assert not connection.closing
        exchange.close()
        assert connection.closing
        exchange.close()
        with pytest.raises(ClientGone):
            await starting


async def test_close_while_connecting_gives_up():
    async with stack(replies(SSE)) as s:
        exchange = s.ingress.relay.exchange(SCOPE, b"", s.replica.address)
        starting = asyncio.ensure_future(exchange.start())
        await asyncio.sleep(0)
        exchange.close()
        with pytest.raises(ClientGone):
            await starting
        assert not s.replica.requests


async def test_cancelled_start_leaves_no_connection_behind():
    async with stack(RawRequest.until_gone) as s:
        for turns in range(8):
            exchange = s.ingress.relay.exchange(SCOPE, b"", s.replica.address)
            starting = asyncio.ensure_future(exchange.start())
            for _ in range(turns):
                await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            exchange.close()
        await until(lambda: all(w.is_closing() for w in s.replica._writers), "every connection to be closed")
        await until(lambda: all(r.connection_gone for r in s.replica.requests), "every request to be dropped")


async def test_head_request_and_status_without_body_pass():
    async with stack(replies(JSON + b"content-length: 10\r\n\r\n")) as s:
        reply = await s.ask(b"HEAD", b"")
        assert (reply.status, reply.headers[b"content-length"], reply.whole) == (200, b"10", True)
        assert (await s.ask(b"HEAD", b"")).status == 200
        assert s.exchange.reused
    async with stack(replies(b"HTTP/1.1 204 No Content\r\n\r\n")) as s:
        assert (await s.ask()).status == 204
        assert (await s.ask()).status == 204
        assert s.exchange.reused


async def test_informational_responses_stay_inside():
    hints = b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n"
    async with stack(replies(*hints, SSE + chunk(EVENT) + END)) as s:
        reply = await s.ask()
        assert (reply.status, reply.body, reply.whole) == (200, EVENT, True)
        assert b"link" not in reply.headers


@pytest.mark.parametrize("kind", [b"text/plain", b"text/event-stream"])
async def test_answer_without_length_ends_with_the_connection(kind):
    async def answer(request: RawRequest) -> None:
        await request.write(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\n\r\nall of ")
        await request.write(b"it")
        request.close()

    async with stack(answer) as s:
        reply = await s.ask()
        assert (reply.body, reply.whole) == (b"all of it", True)


@pytest.mark.parametrize("sent", [b"", SSE], ids=["nothing", "head"])
async def test_replica_without_a_first_token_times_out(sent):
    async def answer(request: RawRequest) -> None:
        if sent:
            await request.write(sent)
        await request.until_gone()

    async with stack(answer, first_token_timeout_s=0.3) as s:
        assert (await s.ask()).status == 502
        assert type(s.ingress.errors[0]) is UpstreamTimeout
        assert s.ingress.errors[0].response_started is bool(sent)
        await until(lambda: s.request.connection_gone, "the replica to be let go")


async def test_reused_connection_that_times_out_is_not_tried_again_here():
    async def answer(request: RawRequest) -> None:
        if len(s.replica.requests) == 1:
            await request.write(SSE + chunk(EVENT) + END)
        else:
            await request.until_gone()

    async with stack(answer, first_token_timeout_s=0.5) as s:
        assert (await s.ask()).whole
        assert (await s.ask()).status == 502
        assert type(s.ingress.errors[0]) is UpstreamTimeout
        assert len(s.replica.requests) == 2


async def test_stale_connections_successor_has_the_same_time_limit():
    async def answer(request: RawRequest) -> None:
        if len(s.replica.requests) == 1:
            await request.write(SSE + chunk(EVENT) + END)
        elif len(s.replica.requests) == 2:
            request.abort()
        else:
            await request.until_gone()

    async with stack(answer, first_token_timeout_s=0.5) as s:
        assert (await s.ask()).whole
        assert (await s.ask()).status == 502
        assert type(s.ingress.errors[0]) is UpstreamTimeout


@pytest.mark.parametrize(
    "first",
    [
        SSE + chunk(EVENT),
        JSON + b"content-length: 10\r\n\r\n",
        JSON + b"content-length: 10\r\n\r\n12345",
    ],
    ids=["stream", "sized, head only", "sized"],
)
async def test_replica_that_falls_silent_inside_its_answer_times_out(first):
    async def answer(request: RawRequest) -> None:
        await request.write(first)
        await request.until_gone()

    async with stack(answer, idle_timeout_s=0.1) as s:
        reply = await s.ask()
        assert reply.status == 502 or not reply.whole
        assert type(s.ingress.errors[0]) is UpstreamTimeout
        assert s.ingress.errors[0].response_started


async def test_pauses_below_the_limit_add_up_to_no_timeout():
    async def answer(request: RawRequest) -> None:
        await request.write(SSE)
        for _ in range(12):
            await request.write(chunk(EVENT))
            await asyncio.sleep(0.1)  # the pause itself is what is tested
        await request.write(END)

    async with stack(answer, idle_timeout_s=1.0) as s:
        reply = await s.ask()
        assert (reply.body, reply.whole) == (EVENT * 12, True)


async def test_error_of_the_tap_truncates_and_does_not_hang():
    go_on = asyncio.Event()

    async def answer(request: RawRequest) -> None:
        await request.write(SSE + chunk(EVENT))
        await go_on.wait()
        await request.write(chunk(EVENT))
        await request.until_gone()

    async with stack(answer) as s:

        def tap(_: bytes) -> None:
            if go_on.is_set():
                raise ZeroDivisionError
            asyncio.get_running_loop().call_later(0.001, go_on.set)

        s.ingress.tap = tap
        reply = await s.ask()
        assert (reply.body, reply.whole) == (EVENT, False)
        assert type(s.ingress.errors[0]) is ZeroDivisionError


async def test_many_at_once_each_get_their_own_answer():
    async def answer(request: RawRequest) -> None:
        await request.write(SSE)
        for _ in range(20):
            await request.write(chunk(request.body))
        await request.write(END)

    async with stack(answer) as s:
        bodies = [b"<%d>" % i for i in range(100)]
        got = await asyncio.gather(*(s.ask(body=body) for body in bodies))
        assert [reply.body for reply in got] == [body * 20 for body in bodies]
        assert all(reply.whole for reply in got)


def test_relay_can_be_pickled_before_its_first_exchange():
    relay = pickle.loads(pickle.dumps(Relay(LimitsConfig(connect_timeout_s=7))))
    assert relay.limits.connect_timeout_s == 7


SCOPE: dict[str, object] = {"type": "http", "method": "GET", "path": "/", "raw_path": b"/", "headers": []}
