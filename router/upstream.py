"""Connections to replicas: HTTP/1.1 with keep-alive, parsed by httptools, one exchange at a time on each.

Bytes go from the socket to the exchange in one callback; no task runs for a piece of body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self, cast

import httptools

RawHeaders = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 128 * 1024


class Address(NamedTuple):
    """Where a replica's own HTTP server listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `host:port` or `[v6]:port`. Raises ValueError."""
        host, colon, port = text.rpartition(":")
        if not colon or not host or not port.isdecimal():
            raise ValueError(f"replica address is {text!r}; needed: host:port")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class UpstreamError(ConnectionError):
    """A replica did not give a whole response."""

    def __init__(self, address: Address, what: str, *, response_started: bool = False) -> None:
        super().__init__(f"replica {address} {what}")
        self.address = address
        self.response_started = response_started
        """Whether any byte of the response was seen, be it an informational 1xx."""


class ConnectFailed(UpstreamError):
    """No connection, so the replica has not seen the request."""


class ClosedBeforeHead(UpstreamError):
    """The connection ended before the response's head was complete."""


class ClosedMidBody(UpstreamError):
    """The connection ended inside the response's body."""


class UpstreamTimeout(UpstreamError):
    """The replica was silent for longer than the limits allow."""


class BadResponse(UpstreamError):
    """What the replica sent is not HTTP/1.1 as a client of this kind may receive it."""


class ResponseSink(Protocol):
    """Takes one response: `on_head` once, `on_body` any number of times, then `on_end` or `on_error` once.

    Called from the socket's callback: must neither block nor raise. Each may abort or release the connection.
    """

    def on_head(self, status: int, headers: RawHeaders) -> None:
        """Final head (never a 1xx); header names in lower case, order kept."""

    def on_body(self, chunk: bytes) -> None:
        """All body bytes of one read from the socket, without framing; never empty."""

    def on_end(self) -> None:
        """The response is whole. The connection may go back to its pool."""

    def on_error(self, error: UpstreamError) -> None:
        """The response will never be whole; the connection is gone."""


class _Response:
    """The response that is being received: what httptools has called back so far."""

    def __init__(self, head_only: bool) -> None:
        self.headers: RawHeaders = []
        self.pieces: list[bytes] = []
        """Body bytes that the sink has not seen."""
        self.started = False
        self.has_head = False
        self.ended = False
        self.keep_alive = False
        self.until_eof = False
        """The response has no framing: only the end of the connection ends it."""
        self._bodiless = head_only
        self._head_bytes = 0
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> str:
        """Parse. Returns what is wrong with the bytes; empty if nothing is."""
        self.started = True
        if not self.has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            problem = "it switches protocols, unasked"
        except httptools.HttpParserError as error:
            problem = str(error)
        else:
            if self.has_head or self._head_bytes <= MAX_HEAD_BYTES:
                return ""
            problem = f"a head of more than {MAX_HEAD_BYTES} bytes"
        self.keep_alive = False
        return problem

    @property
    def status(self) -> int:
        return self._parser.get_status_code()

    def on_message_begin(self) -> None:
        if self.ended:  # bytes after the end: the connection is out of step
            self.keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # trailers come after the head
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self.status < 200 or self.ended:
            return
        self.has_head = True
        if self._bodiless or self.status in (204, 304):
            self._end()
            return
        framing = dict(self.headers)
        chunked = framing.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
        self.until_eof = not chunked and b"content-length" not in framing

    def on_body(self, piece: bytes) -> None:
        if self.ended:
            self.keep_alive = False
        else:
            self.pieces.append(piece)

    def on_message_complete(self) -> None:
        if self.has_head:
            self._end()
        else:
            self.headers = []  # of an informational response; the final one follows

    def _end(self) -> None:
        if not self.ended:
            self.ended = True
            self.keep_alive = self._parser.should_keep_alive()


class Connection(asyncio.Protocol):
    """One connection to a replica.

    Call order: `begin`, `write`, and after the sink's `on_end` ConnectionPool.release, as often as one likes;
    `abort` at any point.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.paused = False
        """Whether reading is stopped, so that TCP holds the replica back."""
        self._transport: asyncio.Transport | None = None
        self._sink: ResponseSink | None = None
        self._response: _Response | None = None
        self._on_lost: Callable[[Connection], None] | None = None

    def begin(self, sink: ResponseSink, *, head_only: bool) -> None:
        """Send the next response to `sink`. `head_only`: it answers a HEAD, so no body follows."""
        assert self._sink is None, "one exchange at a time"
        self._on_lost = None
        self._sink = sink
        self._response = _Response(head_only)
        if self.closing:  # its end came while nobody was listening
            asyncio.get_running_loop().call_soon(self.connection_lost, None)

    def write(self, parts: Sequence[bytes]) -> None:
        if not self.closing:  # uvloop raises on a closed transport; the sink hears of its end anyhow
            cast(asyncio.Transport, self._transport).writelines(parts)

    def pause(self) -> None:
        if not self.paused and not self.closing:
            self.paused = True
            cast(asyncio.Transport, self._transport).pause_reading()

    def resume(self) -> None:
        if self.paused and not self.closing:
            self.paused = False
            cast(asyncio.Transport, self._transport).resume_reading()

    def abort(self) -> None:
        """Close at once, dropping what is unsent and unread; the sink hears nothing more."""
        self._sink = self._on_lost = None
        if self._transport is not None:
            self._transport.abort()

    def rest(self, on_lost: Callable[[Connection], None]) -> None:
        """No exchange uses the connection from here on; `on_lost` is told if it ends meanwhile."""
        self._sink = None
        self._on_lost = on_lost
        self.resume()  # the end of a connection is only seen while reading

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def response_started(self) -> bool:
        return self._response is not None and self._response.started

    @property
    def reusable(self) -> bool:
        """The response is whole, nothing lies in either direction, and the replica keeps the connection."""
        if self._response is None or self._transport is None or self._transport.is_closing():
            return False
        kept = self._response.ended and self._response.keep_alive
        return kept and not self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        sink, response = self._sink, self._response
        if (
            sink is None or response is None
        ):  # bytes that nobody asked for: what came next would be out of step
            self._lose()
            return
        had_head = response.has_head
        problem = response.feed(data)
        if response.has_head and not had_head:
            sink.on_head(response.status, response.headers)
        if response.pieces and self._sink is sink:
            pieces, response.pieces = response.pieces, []
            sink.on_body(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if self._sink is not sink:  # the exchange has given the connection up
            return
        if response.ended:
            sink.on_end()
        elif problem:
            self._fail(BadResponse(self.address, f"sent no valid HTTP: {problem}", response_started=True))

    def connection_lost(self, exc: Exception | None) -> None:
        sink, response = self._sink, self._response
        if sink is None or response is None:
            self._lose()
            return
        if response.until_eof and exc is None:
            response.ended = True
            sink.on_end()
            return
        kind: type[UpstreamError] = ClosedMidBody if response.has_head else ClosedBeforeHead
        when = "inside its answer" if response.has_head else "before it answered"
        what = f"closed the connection {when}" + (f": {exc}" if exc else "")
        self._fail(kind(self.address, what, response_started=response.started))

    def _fail(self, error: UpstreamError) -> None:
        sink = self._sink
        self.abort()
        if sink is not None:
            sink.on_error(error)

    def _lose(self) -> None:
        tell = self._on_lost
        self.abort()
        if tell is not None:
            tell(self)
