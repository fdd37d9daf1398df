"""Responses that vLLM makes in the background: when they end, which nobody but vLLM's own store is told.

A client gets its answer, that the response is queued, long before the response is made. Until it is, the replica has
work that no connection shows.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

FIRST_LOOK_S = 0.05
LONGEST_PAUSE_S = 2.0
LIMIT_S = 3600.0
"""The task of a response may die without a word, and its response stays queued for ever."""

_KEPT = ("type", "asgi", "http_version", "scheme", "server", "client", "root_path", "state")
_UNFINISHED = ("queued", "in_progress")


class _Response(msgspec.Struct):
    status: str = ""


async def ended(inner: ASGIApp, scope: Scope, response: str, limit_s: float = LIMIT_S) -> None:
    """Return once the store of `inner` holds `response` as ended, or no more, or after the limit.

    `scope` is that of the request that made it.
    """
    pause = FIRST_LOOK_S
    clock = asyncio.get_running_loop().time
    end = clock() + limit_s
    while await _status(inner, scope, response) in _UNFINISHED and clock() < end:
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


async def _status(inner: ASGIApp, scope: Scope, response: str) -> str:
    """Empty where there is no such response."""
    path = f"/v1/responses/{response}"
    probe: dict[str, Any] = {key: scope[key] for key in _KEPT if key in scope}
    probe |= {"method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": []}
    request = [{"type": "http.request", "body": b"", "more_body": False}]
    body = bytearray()

    async def receive() -> Message:
        if request:
            return request.pop()
        await asyncio.Event().wait()
        raise AssertionError("unreachable: the client of this request never leaves")

    async def send(message: Message) -> None:
        body.extend(message.get("body", b""))

    await inner(probe, receive, send)
    try:
        return msgspec.json.decode(body, type=_Response).status
    except msgspec.DecodeError:
        return ""
