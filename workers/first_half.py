"""Serving the first half of a request: the prompt is computed and kept, and the answer is a hand-over."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cache_store.event_endpoint import send_error, send_whole
from workers.handover import HANDOVER_HEADER, HANDOVERS_PATH, HELD, REFUSED, FirstHalf, pack_handover
from workers.handovers import Handovers

logger = logging.getLogger(__name__)


async def serve_first_half(
    inner: ASGIApp, scope: Scope, receive: Receive, send: Send, half: FirstHalf, handovers: Handovers
) -> None:
    """Let `inner` serve the request as it would for the client, which checks it and has the prompt computed, and answer
    with the hand-over in place of what it says. What it says where it comes to none is passed on: the client's error.

    `half` is in the request's record.
    """
    withheld = _Withheld(half, send)
    try:
        await inner(scope, receive, withheld)
    except Exception:
        if not half.done:
            raise
        # It misses what the client wanted generated; nobody waits for that.
        logger.debug("the application could not answer a first half", exc_info=True)
    finally:
        await handovers.computed(half)
    if half.handover is not None:
        await _answer(send, 200, HELD, pack_handover(half.handover), b"application/msgpack")
    elif half.refusal:
        await _answer(send, 409, REFUSED, half.refusal.encode(), b"text/plain; charset=utf-8")
    else:
        for message in withheld.messages:
            await send(message)


class _Withheld:
    """An ASGI `send` that keeps what it is given, until nobody will ask for it."""

    def __init__(self, half: FirstHalf, send: Send) -> None:
        self.messages: list[Message] = []
        self._half = half
        self._send = send

    async def __call__(self, message: Message) -> None:
        if not self._half.done:
            self.messages.append(message)


async def serve_end(handovers: Handovers, scope: Scope, send: Send) -> None:
    """DELETE of one hand-over."""
    if scope["method"] != "DELETE":
        await send_error(send, 405, "Method Not Allowed", f"Found {scope['method']}, needed DELETE.")
        return
    name = scope["path"].removeprefix(HANDOVERS_PATH)
    if await handovers.end(name):
        await send_whole(send, 200, b"{}")
    else:
        await send_error(send, 404, "NotFoundError", f"There is no hand-over {name[:128]!r}.")


async def _answer(send: Send, status: int, outcome: str, body: bytes, content_type: bytes) -> None:
    headers = [
        (b"content-type", content_type),
        (b"content-length", str(len(body)).encode()),
        (HANDOVER_HEADER.encode(), outcome.encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
