"""The shortest way for a piece of a streamed body to the client's socket.

Serve hands an ingress a `send` inside two coroutines of its own, and uvicorn's `send` is a third. All of them matter
for the head and for the last message of an answer; for a piece between they come to a chunk written to the transport,
at a price that is most of what the router itself does for a token. So pieces go to uvicorn's transport directly where
this recognises what it was given, and through `send` where not.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

PieceWriter = Callable[[bytes], bool]
"""Takes a piece and writes it; False, with nothing written, when `send` must take it: the client is slow."""

_MOST_LAYERS = 4
_WRAPPERS = {
    "RequestIdMiddleware.__call__.<locals>.send_with_request_id",
    "Replica._direct_ingress_asgi.<locals>.send_user_message",
}
"""Qualified names of Serve's wrappers: plain functions that close over the next `send`."""


def piece_writer(send: object) -> PieceWriter | None:
    """For pieces of a body that are neither first nor last, after the head has gone through `send`.

    None where `send` is not uvicorn's, or is wrapped in what this does not know.
    """
    inner = _innermost(send)
    cycle = getattr(inner, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or getattr(inner, "__name__", "") != "send":
        return None
    return lambda piece: _write(cycle, piece)


def _write(cycle: RequestResponseCycle, piece: bytes) -> bool:
    """What `RequestResponseCycle.send` does with a piece of a chunked body."""
    if cycle.disconnected:
        return True  # dropped, as uvicorn does; that the client has gone is noticed elsewhere
    if not cycle.chunked_encoding or cycle.response_complete or cycle.flow.write_paused or not piece:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    return True


def _innermost(send: object) -> object:
    for _ in range(_MOST_LAYERS):
        if not isinstance(send, FunctionType) or send.__qualname__ not in _WRAPPERS:
            break
        cells: dict[str, Any] = dict(zip(send.__code__.co_freevars, send.__closure__ or (), strict=True))
        inner = cells["send"].cell_contents if "send" in cells else None
        if not isinstance(inner, FunctionType | MethodType):
            break
        send = inner
    return send
