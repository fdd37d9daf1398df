"""What of a head crosses the router, in either direction."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from router.upstream import Address, RawHeaders
from workers.messages import CACHED_HEADER, HANDOVER_HEADER

INTERNAL = b"x-manta-"
"""Headers of the hop between router and replica. A client's are dropped: they would speak for the router."""

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
_NOT_TO_REPLICA = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"authorization",  # replicas know the cluster's secret, not the client's key
    b"x-api-key",
    b"accept-encoding",  # answers stay plain, so that the router can read them
}
_NOT_TO_CLIENT = _HOP_BY_HOP | {b"date", b"server"}
_WITH_BODY = frozenset(("POST", "PUT", "PATCH"))

_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BAD_VALUE = re.compile(rb"[\r\n\0]")
_BAD_TARGET = re.compile(rb"[\0- \x7f]")


class ResponseHead(NamedTuple):
    """The head of a replica's answer, as a client may see it."""

    status: int
    headers: RawHeaders
    """End-to-end headers, names in lower case; none that is internal."""
    event_stream: bool
    """The body is text/event-stream."""
    content_length: int | None
    cached: str | None
    """Value of the replica's `x-manta-cached`."""
    handover: str | None = None
    """Value of its `x-manta-handover`."""

    @classmethod
    def of(cls, status: int, raw: RawHeaders) -> ResponseHead:
        dropped = _NOT_TO_CLIENT | _named_by_connection(raw)
        headers = [item for item in raw if item[0] not in dropped and not item[0].startswith(INTERNAL)]
        last = dict(raw)
        length = last.get(b"content-length", b"")
        cached, handover = last.get(CACHED_HEADER.encode()), last.get(HANDOVER_HEADER.encode())
        return cls(
            status,
            headers,
            last.get(b"content-type", b"").lower().startswith(b"text/event-stream"),
            int(length) if length.isdigit() else None,
            cached.decode("latin-1") if cached is not None else None,
            handover.decode("latin-1") if handover is not None else None,
        )


def request_head(
    scope: Mapping[str, Any], address: Address, body_bytes: int, internal: Iterable[tuple[bytes, bytes]] = ()
) -> bytes:
    """The head of the request to the replica, with its empty line.

    `scope` is the client's ASGI scope; headers of `internal` replace the client's of the same name. Raises
    ValueError where a target, name or value would break the head's framing.
    """
    method: str = scope["method"]
    target = scope.get("raw_path") or quote(scope["path"]).encode()
    if scope.get("query_string"):
        target += b"?" + scope["query_string"]
    if not _TOKEN.fullmatch(method.encode()) or _BAD_TARGET.search(target):
        raise ValueError(f"request line {method!r} {target!r} has a byte that may not stand there")
    ours = [(name.lower(), value) for name, value in internal]
    client = [(name.lower(), value) for name, value in scope["headers"]]
    dropped = _NOT_TO_REPLICA | _named_by_connection(client) | {name for name, _ in ours}
    lines = [b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (method.encode(), target, str(address).encode())]
    for name, value in client:
        if name not in dropped and not name.startswith(INTERNAL):
            lines.append(_line(name, value))
    lines += [_line(name, value) for name, value in ours]
    if body_bytes or method in _WITH_BODY:
        lines.append(b"content-length: %d\r\n" % body_bytes)
    lines.append(b"\r\n")
    return b"".join(lines)


def parse_cached(header: str) -> dict[str, int]:
    """`hbm=512,computed=98` as a map. What is not of that form is left out."""
    tokens: dict[str, int] = {}
    for part in header.split(","):
        tier, _, count = part.partition("=")
        if count.isdecimal():
            tokens[tier] = int(count)
    return tokens


def _line(name: bytes, value: bytes) -> bytes:
    if not _TOKEN.fullmatch(name) or _BAD_VALUE.search(value):
        raise ValueError(f"header {name!r} has a byte that may not stand in a header")
    return b"%s: %s\r\n" % (name, value)


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    return {
        token.strip().lower()
        for name, value in headers
        if name == b"connection"
        for token in value.split(b",")
    }
