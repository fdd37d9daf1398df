"""One HTTP request and its answer over ASGI, with a way to break the connection."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send


class ClientGoneError(Exception):
    """The client has closed the connection, or a fault has."""


class Connection:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._receive = receive
        self._send = send

    def header(self, name: bytes) -> bytes:
        return self._headers.get(name, b"")

    async def body(self) -> bytes:
        """The whole body. Raises ClientGoneError when the client leaves before its end."""
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    async def wait_until_gone(self) -> None:
        """Call after the body was read. Raises ClientGoneError when the client has gone."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        raise ClientGoneError

    async def start(self, status: int, content_type: bytes, length: int | None = None) -> None:
        headers = [(b"content-type", content_type)]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def respond(
        self, data: bytes, status: int = HTTPStatus.OK, content_type: bytes = b"text/plain; charset=utf-8"
    ) -> None:
        await self.start(status, content_type, len(data))
        await self.send(data, more=False)

    async def json(self, data: Any, status: int = HTTPStatus.OK) -> None:
        await self.respond(msgspec.json.encode(data), status, b"application/json")

    async def drop(self) -> None:
        """Break the connection, as a process that dies does. Raises ClientGoneError.

        ASGI has no word for that: the transport is looked up in uvicorn's request cycle, which sends in the
        end. With another server the answer just stays unfinished.
        """
        transport = _transport(self._send)
        if transport is not None:
            # What was sent so far still goes out. A return before the server knows would make it send a 500.
            transport.close()
            await self.wait_until_gone()
        raise ClientGoneError


def _transport(send: Any) -> asyncio.Transport | None:
    while send is not None:
        transport: asyncio.Transport | None = getattr(getattr(send, "__self__", None), "transport", None)
        if transport is not None:
            return transport
        send = getattr(send, "_send", None)
    return None
