"""The HTTP layer around an engine's OpenAI application.

Pure ASGI. It checks the cluster's secret on every path, counts open requests, takes the router's token ids off the
body, holds the answer's head until the first token, so that a router may still retry, and serves the event stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cache_store.event_endpoint import knows_secret, send_error, send_whole, serve_events
from cache_store.stream import Publisher
from workers.messages import (
    CACHED_HEADER,
    DRAIN_PATH,
    LENGTHS_HEADER,
    PLAN_HEADER,
    REQUEST_ID_HEADER,
    SALT_HEADER,
    DrainState,
    unpack_plan,
    unpack_prompts,
)
from workers.request_record import RequestRecord, current_request

logger = logging.getLogger(__name__)

_MAX_HELD_BYTES = 1024 * 1024


class ReplicaApp:
    """ASGI application of one replica."""

    def __init__(
        self,
        inner: ASGIApp,
        publisher: Publisher,
        secret: str,
        set_cordoned: Callable[[bool], bool] = lambda cordoned: cordoned,
    ) -> None:
        """`set_cordoned` tells the replica whether to take requests; it returns whether the replica drains now."""
        self._inner = inner
        self._set_cordoned = set_cordoned
        self._publisher = publisher
        self._secret = secret.encode()
        self.open_requests = 0
        """Requests of clients that are being served; event streams do not count."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        if not knows_secret(scope, self._secret):
            await send_error(send, 401, "AuthenticationError", "The cluster's secret is missing or wrong.")
        elif scope["path"] == DRAIN_PATH:
            await self._drain(scope["method"], send)
        elif not await serve_events(self._publisher, scope["path"], receive, send):
            headers = {name: value for name, value in scope["headers"] if name.startswith(b"x-manta-")}
            await self._request(scope, receive, send, headers)

    async def _request(self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]) -> None:
        record = RequestRecord(
            request_id=headers.get(REQUEST_ID_HEADER.encode(), b"").decode("latin-1"),
            salt=headers.get(SALT_HEADER.encode(), b"").decode("latin-1"),
        )
        self.open_requests += 1
        self.idle.clear()
        token = current_request.set(record)
        try:
            lengths, plan = headers.get(LENGTHS_HEADER.encode()), headers.get(PLAN_HEADER.encode())
            body = await _read_body(receive) if lengths is not None else b""
            if body is None:
                return
            try:
                if plan is not None:
                    record.plan = unpack_plan(plan.decode("latin-1"))
                if lengths is not None:
                    body, record.prompts = unpack_prompts(body, lengths.decode("latin-1"))
                    scope, receive = _with_body(scope, receive, body)
            except ValueError as error:
                await send_error(send, 400, "BadRequestError", str(error))
                return
            await self._inner(scope, receive, _HeldHead(record, send))
        finally:
            current_request.reset(token)
            self.open_requests -= 1
            if not self.open_requests:
                self.idle.set()

    async def _drain(self, method: str, send: Send) -> None:
        if method not in ("PUT", "DELETE"):
            await send_error(send, 405, "Method Not Allowed", f"Found {method}, needed PUT or DELETE.")
            return
        draining = self._set_cordoned(method == "PUT")
        await send_whole(send, 200, msgspec.json.encode(DrainState(draining, self.open_requests)))


class _HeldHead:
    """An ASGI `send` that keeps the head of an answer until the engine has made the first token.

    vLLM sends its 200 before prefill begins. Held back, the head can tell how much was cached, and a router whose
    replica dies during prefill has seen nothing yet. Answers of other endpoints make no token: they are held until
    they end or grow large.
    """

    def __init__(self, record: RequestRecord, send: Send) -> None:
        self._record = record
        self._send = send
        self._held: list[Message] | None = []
        self._held_bytes = 0

    async def __call__(self, message: Message) -> None:
        if self._held is None:
            await self._send(message)
            return
        self._held.append(message)
        if message["type"] == "http.response.start":
            return
        self._held_bytes += len(message.get("body", b""))
        if (
            self._record.first_output.is_set()
            or not message.get("more_body")
            or self._held_bytes > _MAX_HELD_BYTES
        ):
            held, self._held = self._held, None
            if self._record.first_output.is_set():
                held[0]["headers"] = [
                    *held[0].get("headers", ()),
                    (CACHED_HEADER.encode(), self._record.cached_header.encode()),
                ]
            for each in held:
                await self._send(each)


async def _read_body(receive: Receive) -> bytes | None:
    """The whole body, or None when the client went away first."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _with_body(scope: Scope, receive: Receive, body: bytes) -> tuple[Scope, Receive]:
    """The request with another body; what comes after the body (a disconnect) is still received."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    given = False

    async def receive_body() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return {**scope, "headers": headers}, receive_body
