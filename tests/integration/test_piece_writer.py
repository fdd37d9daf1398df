"""Pieces that go to uvicorn's transport directly are on the wire as if they had gone through `send`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
from ray.serve._private import http_util
from ray.serve._private.replica import Replica

from cache_store.app_server import AppServer, bound_socket
from router import piece_writer as module
from router.client import ClientStream
from router.piece_writer import piece_writer

HOST = "127.0.0.1"
PIECES = [b"data: one\n\n", b"x" * 70_000, b"\r\n0\r\n\r\n", b"data: [DONE]\n\n"]


async def answer_of(application: Any, method: bytes = b"GET", version: bytes = b"1.1") -> bytes:
    """What a client reads until the connection ends."""
    server = AppServer([application], [bound_socket(HOST)])
    await server.start()
    try:
        host, _, port = server.addresses[0].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(method + b" / HTTP/" + version + b"\r\nhost: x\r\nconnection: close\r\n\r\n")
        data = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return data
    finally:
        await server.stop()


def streaming(push: Callable[[ClientStream, Any, bytes], Any], seen: list[bool]) -> Any:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        client = ClientStream(send, 10)
        await client.start(200, [(b"content-type", b"text/event-stream")])
        for piece in PIECES:
            seen.append(await push(client, send, piece))
        await client.body(b"", more=False)

    return application


async def through_push(client: ClientStream, send: Any, piece: bytes) -> bool:
    direct = piece_writer(send) is not None
    if not client.push(piece):
        await client.finish()
    return direct


async def through_send(client: ClientStream, send: Any, piece: bytes) -> bool:
    await send({"type": "http.response.body", "body": piece, "more_body": True})
    return False


@pytest.mark.parametrize(("method", "version"), [(b"GET", b"1.1"), (b"GET", b"1.0"), (b"HEAD", b"1.1")])
async def test_the_wire_looks_the_same(method: bytes, version: bytes) -> None:
    direct: list[bool] = []
    told = {}
    for way in (through_push, through_send):
        data = await answer_of(streaming(way, direct if way is through_push else []), method, version)
        head, _, body = data.partition(b"\r\n\r\n")
        told[way] = ([line for line in head.split(b"\r\n") if not line.startswith(b"date")], body)
    assert told[through_push] == told[through_send]
    assert direct == [True] * len(PIECES)


async def test_a_slow_client_is_waited_for_by_send() -> None:
    slow = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        client = ClientStream(send, 10)
        await client.start(200, [])
        for _ in range(400):
            if not client.push(b"y" * 65_536):
                slow.set()
            await client.finish()
        await client.body(b"", more=False)

    server = AppServer([application], [bound_socket(HOST)])
    await server.start()
    try:
        host, _, port = server.addresses[0].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**16)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(10):
            await slow.wait()  # nothing is read until the server has noticed
            data = await reader.read()
            while piece := await reader.read(2**20):
                data += piece
        writer.close()
        assert data.count(b"y") == 400 * 65_536
    finally:
        await server.stop()


async def test_serves_middleware_is_seen_through() -> None:
    """Under Serve's own middleware, a real one around a real uvicorn, pieces still go directly."""
    direct: list[bool] = []
    wrapped = http_util.RequestIdMiddleware(streaming(through_push, direct))
    data = await answer_of(wrapped)
    assert direct == [True] * len(PIECES)
    assert b"x-request-id" in data.lower()


def test_a_wrapper_of_somebody_else_is_not_passed_by() -> None:
    async def logging_send(message: MutableMapping[str, Any]) -> None: ...

    assert piece_writer(logging_send) is None


def test_the_wrappers_of_this_ray_are_the_ones_known() -> None:
    """A Ray that names or writes them otherwise only costs speed; this says so when the lock is refreshed."""
    source = inspect.getsource(Replica._direct_ingress_asgi)
    assert "async def send_user_message" in source
    assert "await send(msg)" in source
    assert {name.rpartition(".")[2] for name in module._WRAPPERS} == {
        "send_user_message",
        "send_with_request_id",
    }
