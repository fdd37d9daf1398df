"""The HTTP layer around an engine's OpenAI application.

Pure ASGI. It checks the cluster's secret on every path, counts open requests, takes the router's token ids off the
body, holds the answer's head until the first token, so that a router may still retry, and serves the event stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cache_store.event_endpoint import knows_secret, read_body, send_error, send_whole, serve_events
from cache_store.stream import Publisher
from workers.first_half import serve_end, serve_first_half
from workers.handover import Fetch, split_fetch
from workers.handovers import Handovers
from workers.messages import (
    CACHED_HEADER,
    DRAIN_PATH,
    FETCH_HEADER,
    HANDOVER_HEADER,
    HANDOVERS_PATH,
    LENGTHS_HEADER,
    PLAN_HEADER,
    REQUEST_ID_HEADER,
    RESERVATION_HEADER,
    SALT_HEADER,
    DrainState,
    unpack_plan,
    unpack_prompts,
    unpack_reservation,
)
from workers.open_requests import OpenRequests
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
        requests: OpenRequests | None = None,
        handovers: Handovers | None = None,
    ) -> None:
        """`set_cordoned` tells the replica whether to take requests; it returns whether the replica drains now.
        `requests` is where what clients ask for is counted; event streams are not. `handovers` is where prompts are
        kept that are computed for other replicas; None where none can be, and none is fetched either."""
        self._inner = inner
        self._set_cordoned = set_cordoned
        self._publisher = publisher
        self._secret = secret.encode()
        self._requests = requests if requests is not None else OpenRequests()
        self._handovers = handovers
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()

    @property
    def open_requests(self) -> int:
        return len(self._requests)

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
        elif scope["path"].startswith(HANDOVERS_PATH) and self._handovers is not None:
            await serve_end(self._handovers, scope, send)
        elif not await serve_events(self._publisher, scope["path"], receive, send):
            headers = {name: value for name, value in scope["headers"] if name.startswith(b"x-manta-")}
            await self._request(scope, receive, send, headers)

    async def _request(self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]) -> None:
        reservation = headers.get(RESERVATION_HEADER.encode())
        try:
            name = unpack_reservation(reservation.decode("latin-1")) if reservation is not None else None
        except ValueError as error:
            await send_error(send, 400, "BadRequestError", str(error))
            return
        opened = self._requests.open(name)
        record = RequestRecord(
            request_id=headers.get(REQUEST_ID_HEADER.encode(), b"").decode("latin-1"),
            salt=headers.get(SALT_HEADER.encode(), b"").decode("latin-1"),
            opened=opened,
        )
        self.idle.clear()
        token = current_request.set(record)
        try:
            try:
                read = await self._read(scope, receive, headers, record)
            except ValueError as error:
                await send_error(send, 400, "BadRequestError", str(error))
                return
            if read is None:
                return
            if record.first_half is None:
                await self._inner(*read, _HeldHead(record, send))
            else:
                assert self._handovers is not None
                await serve_first_half(self._inner, *read, send, record.first_half, self._handovers)
        finally:
            current_request.reset(token)
            opened.close()
            if not self.open_requests:
                self.idle.set()

    async def _read(
        self, scope: Scope, receive: Receive, headers: dict[bytes, bytes], record: RequestRecord
    ) -> tuple[Scope, Receive] | None:
        """Take into the record what the router has put into headers and body, and return the request without it; None
        where the client went away first. Raises ValueError."""
        plan, lengths, fetch, first_half = (
            value.decode("latin-1") if (value := headers.get(name.encode())) is not None else None
            for name in (PLAN_HEADER, LENGTHS_HEADER, FETCH_HEADER, HANDOVER_HEADER)
        )
        if plan is not None:
            record.plan = unpack_plan(plan)
        if lengths is not None:
            body = await read_body(receive)
            if body is None:
                return None
            if fetch is not None:
                body, handover = split_fetch(body, fetch)
                record.fetch = Fetch(handover, time.monotonic() + handover.hold_s)
            body, record.prompts = unpack_prompts(body, lengths)
            scope, receive = _with_body(scope, receive, body)
        if first_half is not None:
            if self._handovers is None:
                raise ValueError(f"{HANDOVER_HEADER}: this replica keeps no prompts for others")
            record.first_half = self._handovers.begin(first_half)
        return scope, receive

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
