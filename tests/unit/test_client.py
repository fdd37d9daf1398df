"""Sending to a client as it can take it, and noticing that it has gone."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import uvloop

from router.client import ClientGone, ClientStalled, ClientStream, ClientWatch

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request):
    return request.param()


class GatedSend:
    """An ASGI `send` that suspends until `gate` is resolved, twice over."""

    def __init__(self) -> None:
        self.gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent: list[bytes] = []
        self.cancelled = False

    async def __call__(self, message) -> None:
        try:
            await asyncio.shield(self.gate)
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        self.sent.append(message["body"])


async def push_from_callback(client: ClientStream, piece: bytes) -> bool:
    pushed = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: pushed.set_result(client.push(piece)))
    return await pushed


async def test_piece_pushed_at_a_slow_client_is_finished_by_a_task():
    send = GatedSend()
    client = ClientStream(send, 20)
    assert await push_from_callback(client, b"one") is False
    finishing = asyncio.ensure_future(client.finish())
    await asyncio.sleep(0)
    assert not send.sent
    send.gate.set_result(None)
    await finishing
    assert send.sent == [b"one"]
    await client.finish()
    assert send.sent == [b"one"]


async def test_error_that_a_suspended_send_waits_for_reaches_it():
    send = GatedSend()
    client = ClientStream(send, 20)
    assert await push_from_callback(client, b"one") is False
    send.gate.set_exception(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        await client.finish()
    assert not send.sent


async def test_suspended_send_sees_the_stall_and_the_cancellation_of_its_task():
    for stall_s, kind in ((0.01, ClientStalled), (20, asyncio.CancelledError)):
        send = GatedSend()
        client = ClientStream(send, stall_s)
        assert await push_from_callback(client, b"one") is False
        finishing = asyncio.ensure_future(client.finish())
        await asyncio.sleep(0)
        if kind is asyncio.CancelledError:
            finishing.cancel()
        with pytest.raises(kind):
            await finishing
        assert send.cancelled


async def test_cancellation_reaches_a_send_that_waits_for_no_future():
    cancelled = asyncio.Event()

    async def send(message) -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    client = ClientStream(send, 20)
    assert await push_from_callback(client, b"one") is False
    finishing = asyncio.ensure_future(client.finish())
    asyncio.get_running_loop().call_soon(finishing.cancel)
    with pytest.raises(asyncio.CancelledError):
        await finishing
    assert cancelled.is_set()


async def test_client_watch_ends_a_wait_in_a_queue():
    gone = asyncio.Event()

    async def receive():
        await gone.wait()
        return {"type": "http.disconnect"}

    with ClientWatch(receive) as watch:
        assert await watch.unless_gone(asyncio.sleep(0, "a place")) == "a place"
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(watch.unless_gone(place))
        await asyncio.sleep(0)
        gone.set()
        with pytest.raises(ClientGone):
            await waiting
        assert place.cancelled()
        with pytest.raises(ClientGone):
            await watch.unless_gone(asyncio.Event().wait())
        called: list[int] = []
        watch.on_gone(partial(called.append, 1))
        assert called == [1]


async def test_client_watch_lets_a_cancellation_through():
    async def receive():
        await asyncio.Event().wait()

    with ClientWatch(receive) as watch:
        waiting = asyncio.ensure_future(watch.unless_gone(asyncio.Event().wait()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not watch.gone
