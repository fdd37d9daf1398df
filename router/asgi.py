"""Plain requests and answers over ASGI."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

from router import errors
from router.client import ClientGone, Receive, Send
from router.errors import ApiError

Scope = MutableMapping[str, Any]


def below_root(scope: Scope) -> Scope:
    """The request as if the application were served at `/`: without the part of its path that it is mounted at."""
    root = scope.get("root_path", "")
    path = scope["path"]
    if not root or (path != root and not path.startswith(f"{root}/")):
        return scope
    raw, raw_root = scope.get("raw_path") or b"", root.encode()
    # Where the client has escaped what needs no escape, `raw_path` can't be cut, and is made of `path` where needed.
    inner = raw[len(raw_root) :] if raw.startswith(raw_root + b"/") else None
    return {**scope, "path": path[len(root) :] or "/", "raw_path": inner, "root_path": ""}


def check_method(method: str, allowed: tuple[str, ...]) -> None:
    """Raises ApiError 405."""
    if method not in allowed:
        raise errors.method_not_allowed(method, allowed)


async def read_body(receive: Receive, headers: dict[bytes, bytes], limit: int) -> bytes:
    """The whole body. Raises ApiError 413 over `limit` bytes, and ClientGone."""
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        raise errors.body_too_large(limit, int(length))
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left before its request was complete")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise errors.body_too_large(limit)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def send_error(send: Send, error: ApiError) -> None:
    await send({"type": "http.response.start", "status": error.status, "headers": error.headers()})
    await send({"type": "http.response.body", "body": error.body()})


async def send_json(send: Send, status: int, value: Any) -> None:
    await send_bytes(send, status, json.dumps(value).encode(), "application/json")


async def send_bytes(send: Send, status: int, body: bytes, content_type: str) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def serve_lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
