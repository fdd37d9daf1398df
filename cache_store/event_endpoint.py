"""Serving one holder's event stream over HTTP, and the small ASGI pieces that every internal server needs.

Pure ASGI, used by replicas and cache actors.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Callable, Coroutine

from starlette.types import Message, Receive, Scope, Send

from cache_store.events import encode_frame
from cache_store.stream import Publisher

SECRET_HEADER = "x-manta-secret"
EVENTS_PATH = "/manta/events"
"""GET: the event stream (`cache_store.events`), until either side closes."""
SNAPSHOT_PATH = "/manta/snapshot"
"""GET: Hello and one Snapshot per tier, then the end."""

_EVENTS_BUFFER_BYTES = 64 * 1024 * 1024


def knows_secret(scope: Scope, secret: bytes) -> bool:
    """Whether the request carries the cluster's secret; compared in constant time."""
    given = next((value for name, value in scope["headers"] if name == SECRET_HEADER.encode()), b"")
    return hmac.compare_digest(given, secret)


async def serve_events(publisher: Publisher, path: str, receive: Receive, send: Send) -> bool:
    """Answer EVENTS_PATH or SNAPSHOT_PATH. Returns False, with nothing sent, for any other path."""
    if path == EVENTS_PATH:
        await _stream(publisher, receive, send)
    elif path == SNAPSHOT_PATH:
        frames = [encode_frame(publisher.hello), *map(encode_frame, publisher.snapshot())]
        await send_whole(send, 200, b"".join(frames), b"application/octet-stream")
    else:
        return False
    return True


async def _stream(publisher: Publisher, receive: Receive, send: Send) -> None:
    subscription = publisher.subscribe(_EVENTS_BUFFER_BYTES)

    async def forward(frames: AsyncIterator[bytes]) -> None:
        async for frame in frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})

    headers = [(b"content-type", b"application/octet-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await _until_disconnect(forward(subscription.frames()), receive, subscription.close)


async def _until_disconnect(
    work: Coroutine[None, None, None], receive: Receive, close: Callable[[], None]
) -> None:
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        close()
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(receive: Receive, max_bytes: int | None = None) -> bytes | None:
    """The whole body; None when the client went away first. Raises ValueError for one that is longer than
    `max_bytes`."""
    parts: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"a body of more than {max_bytes} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


async def send_error(send: Send, status: int, kind: str, message: str) -> None:
    """In OpenAI's shape."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    await send_whole(send, status, json.dumps({"error": error}).encode())


async def send_whole(send: Send, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
    headers = [(b"content-length", str(len(body)).encode()), (b"content-type", content_type)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
