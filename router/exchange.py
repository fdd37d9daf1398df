"""One request forwarded to one replica, byte for byte.

What costs is a piece of body: the callback of the replica's socket parses it and runs the client's `send` to
its end, without a task. Only when `send` suspends, because the client is slow, does the task that called
`Exchange.stream` finish it; the replica's socket is paused until then.

Only pure ASGI layers may stand around it: one that moves bodies through a queue of its own would undo that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from router.client import ClientGone, ClientStream, Send
from router.config import LimitsConfig
from router.connection_pool import ConnectionPool
from router.headers import ResponseHead
from router.upstream import Address, ClosedBeforeHead, Connection, RawHeaders, UpstreamError, UpstreamTimeout

Tap = Callable[[bytes], None]
"""Sees every piece of a replica's body as it arrives, also of an answer given up later. Must be quick."""


class Exchange:
    """One request on one replica. Call order: `start`, `stream`; `close` at any point, or at the end."""

    def __init__(
        self,
        pool: ConnectionPool,
        address: Address,
        request: Sequence[bytes],
        limits: LimitsConfig,
        *,
        head_only: bool = False,
        held_bytes: int,
        first_token_timeout_s: float | None = None,
        tap: Tap | None = None,
    ) -> None:
        self.address = address
        self.head: ResponseHead | None = None
        self.reused = False
        """Whether the request went out on a kept connection."""
        self.queued_bytes = 0
        """Bytes of the body that wait here."""
        self.slow_pieces = 0
        """Pieces that the streaming task had to deliver, at the price of a task switch each."""
        self._pool = pool
        self._request = request
        self._limits = limits
        self._head_only = head_only
        self._held_bytes = held_bytes
        self._first_token_timeout_s = first_token_timeout_s or limits.first_token_timeout_s
        self._tap = tap
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._queue: deque[bytes] = deque()
        self._client: ClientStream | None = None
        self._direct = False
        """Whether the callback may push to the client; nothing is queued then, and the task waits."""
        self._streaming = False
        self._has_body = self._ended = self._closed = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began = self._last_byte = 0.0

    async def start(self) -> ResponseHead:
        """Send the request; return once the answer can be committed to. The client has seen nothing by then.

        An event stream is committed to at its first body byte: the replica holds its head until the first
        token. Any other answer is read whole first, up to a bound, so that a replica that dies inside it can
        be replaced unseen. Raises UpstreamError (another replica may be tried), or ClientGone when `close` is
        called meanwhile.

        A kept connection that ends without a byte of response was stale: the request is sent once more on a
        fresh one.
        """
        assert self._timer is None, "an exchange starts once"
        self._began = self._loop.time()
        try:
            if (kept := self._pool.take(self.address)) is not None:
                self.reused = True
                try:
                    return await self._attempt(kept)
                except ClosedBeforeHead as error:
                    if error.response_started:
                        raise
                    self.reused, self._error = False, None
            return await self._attempt(await self._connect())
        except BaseException:
            self.close()
            raise

    async def stream(self, send: Send, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Send the whole answer, with `headers` added to its head. `start` must have returned.

        Raises UpstreamError when the replica fails inside the answer, after all that came from it has been
        sent; ClientStalled; ClientGone when `close` is called meanwhile; what `send` raises. The answer is
        then cut short: let the error out of the ASGI application, and never send a final piece.
        """
        assert self.head is not None, "start comes first"
        self._client = ClientStream(send, self._limits.idle_timeout_s)
        try:
            await self._client.start(self.head.status, [*self.head.headers, *headers])
            await self._stream_body(self._client)
        finally:
            self.close()

    def close(self) -> None:
        """Give the exchange up, from a task or a callback. Does nothing to an answer that is through.

        If the replica has not ended its answer, its connection is aborted before this returns.
        """
        self._closed = True
        self._detach()
        if self._connecting is not None:
            self._connecting.cancel()
        if self._client is not None:
            self._client.close()
        self._wake()

    @property
    def paused(self) -> bool:
        """Whether the replica is held back because the client is slow."""
        return self._connection is not None and self._connection.paused

    def on_head(self, status: int, headers: RawHeaders) -> None:
        """ResponseSink."""
        self.head = ResponseHead.of(status, headers)
        self._last_byte = self._loop.time()
        if not self.head.event_stream:
            self._arm(self._last_byte + self._limits.idle_timeout_s)
        if (self.head.content_length or 0) > self._held_bytes:
            self._held_bytes = 0  # it can't be held whole, so there is no use in beginning

    def on_body(self, chunk: bytes) -> None:
        """ResponseSink."""
        self._last_byte = self._loop.time()
        if not self._has_body:
            self._has_body = True
            self._arm(self._last_byte + self._limits.idle_timeout_s)
        try:
            if self._tap is not None:
                self._tap(chunk)
            if not self._direct:
                self._enqueue(chunk)
            elif self._client is not None and not self._client.push(chunk):
                self._hand_over()
        except Exception as error:
            self._give_up(error)

    def on_end(self) -> None:
        """ResponseSink."""
        self._ended = True
        self._stop_timer()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self._pool.release(connection)
        self._wake()

    def on_error(self, error: UpstreamError) -> None:
        """ResponseSink."""
        self._give_up(error)

    async def _connect(self) -> Connection:
        self._connecting = self._loop.create_task(
            self._pool.connect(self.address, self._limits.connect_timeout_s)
        )
        try:
            return await self._connecting
        except asyncio.CancelledError:
            self._connecting.add_done_callback(_discard)
            current = asyncio.current_task()
            if not (current and current.cancelling()):
                self._check()
            raise
        finally:
            self._connecting = None

    async def _attempt(self, connection: Connection) -> ResponseHead:
        if self._closed:
            connection.abort()
        self._check()
        self._connection = connection
        self._arm(self._began + self._first_token_timeout_s)
        connection.begin(self, head_only=self._head_only)
        connection.write(self._request)
        while not self._committable:
            await self._wait()
            self._check()
        assert self.head is not None
        return self.head

    @property
    def _committable(self) -> bool:
        if self._ended or self.head is None:
            return self._ended
        return self.queued_bytes > (0 if self.head.event_stream else self._held_bytes)

    async def _stream_body(self, client: ClientStream) -> None:
        """Empty the queue, then leave the client to the callback until there is something to do here."""
        while True:
            await client.finish()  # older than all that is queued
            while self._queue:
                self._check_closed()
                chunk = self._queue.popleft()
                self.queued_bytes -= len(chunk)
                last = self._ended and not self._queue
                await client.body(chunk, more=not last)
                if last:
                    return
            if self._ended:
                self._check_closed()
                await client.body(b"", more=False)
                return
            self._check()
            self._streaming = self._direct = True
            self._last_byte = self._loop.time()  # time spent on the client is not the replica's silence
            if self._connection is not None:
                self._connection.resume()
            try:
                await self._wait()
            finally:
                self._direct = False

    def _enqueue(self, chunk: bytes) -> None:
        self._queue.append(chunk)
        self.queued_bytes += len(chunk)
        self.slow_pieces += self._streaming
        if self._streaming or self._committable:
            if self.queued_bytes > self._limits.max_buffered_bytes and self._connection is not None:
                self._connection.pause()
            self._wake()

    def _hand_over(self) -> None:
        """The client is slow: the task goes on with it, and the replica waits."""
        self._direct = False
        self.slow_pieces += 1
        if self._connection is not None:
            self._connection.pause()
        self._wake()

    def _check_silence(self) -> None:
        """Timer, one per exchange: it looks when the last byte came, so that a byte needs none of its own."""
        now = self._loop.time()
        if self.paused:  # the replica is not silent, it is not heard
            self._last_byte = now
        waits_for_first = self.head is None or (self.head.event_stream and not self._has_body)
        limit = self._first_token_timeout_s if waits_for_first else self._limits.idle_timeout_s
        due = (self._began if waits_for_first else self._last_byte) + limit
        if now < due:
            self._arm(due)
            return
        started = self._connection is not None and self._connection.response_started
        what = "gave no first token" if waits_for_first else "was silent inside its answer"
        self._give_up(UpstreamTimeout(self.address, f"{what} for {limit} s", response_started=started))

    def _give_up(self, error: Exception) -> None:
        self._error = self._error or error
        self._detach()
        self._wake()

    def _detach(self) -> None:
        self._direct = False
        self._stop_timer()
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    def _arm(self, due: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_at(due, self._check_silence)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._check_closed()
        if self._error is not None:
            raise self._error

    def _check_closed(self) -> None:
        if self._closed:
            raise ClientGone(f"the exchange with replica {self.address} was closed: its client has gone")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


def _discard(connecting: asyncio.Task[Connection]) -> None:
    """Close a connection that was made while the exchange was being cancelled."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().abort()
