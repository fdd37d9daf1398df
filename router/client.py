"""The client's side of an exchange: sending to it as it can take it, and noticing that it has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from typing import Any, Self, TypeVar

from router.piece_writer import piece_writer
from router.upstream import RawHeaders

logger = logging.getLogger(__name__)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
T = TypeVar("T")


class ClientGone(ConnectionError):
    """There is nobody to answer any more."""


class ClientStalled(ConnectionError):
    """The client took no byte for too long."""


class ClientStream:
    """One answer through an ASGI `send`. Call order: `start`, then `push` or `body`; after a False, `finish`.

    Raises ClientStalled where a single `send` stays suspended for longer than `stall_timeout_s`.
    """

    def __init__(self, send: Send, stall_timeout_s: float) -> None:
        self._send = send
        self._write = piece_writer(send)
        self._stall_timeout_s = stall_timeout_s
        self._suspended: _SuspendedSend | None = None

    async def start(self, status: int, headers: RawHeaders) -> None:
        await self._within_limit(
            self._send({"type": "http.response.start", "status": status, "headers": headers})
        )

    async def body(self, chunk: bytes, *, more: bool) -> None:
        """`more=False` ends the answer, which must be whole."""
        assert self._suspended is None, "finish comes first"
        await self._within_limit(self._send(_body(chunk, more)))

    def push(self, chunk: bytes) -> bool:
        """Send a piece right here, without a task. False: the client is slow, a task must `finish` it."""
        assert self._suspended is None, "finish comes first"
        if self._write is not None and self._write(chunk):
            return True
        steps = self._send(_body(chunk, True)).__await__()
        try:
            awaited = next(steps)
        except StopIteration:
            return True
        self._suspended = _SuspendedSend(steps, awaited)
        return False

    async def finish(self) -> None:
        """Complete the piece whose `push` returned False, if there is one."""
        suspended, self._suspended = self._suspended, None
        if suspended is not None:
            await self._within_limit(suspended)

    def close(self) -> None:
        """Drop the piece that nobody will finish."""
        if self._suspended is not None:
            self._suspended.close()
            self._suspended = None

    async def _within_limit(self, sending: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s) as limit:
                await sending
        except TimeoutError as error:
            if limit.expired():
                raise ClientStalled(f"the client took nothing for {self._stall_timeout_s} s") from error
            raise


class ClientWatch:
    """Notices that the client has gone. Create it once the request's body is read: `receive` is then its own.

    A context manager: the watching ends with the block.
    """

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._on_gone: Callable[[], object] | None = None
        self._task = asyncio.get_running_loop().create_task(self._watch(receive))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._on_gone = None
        self._task.cancel()

    def on_gone(self, callback: Callable[[], object] | None) -> None:
        """Call `callback`, the last one given, as soon as `http.disconnect` arrives; at once if it has."""
        self._on_gone = callback
        if self.gone and callback is not None:
            callback()

    async def unless_gone(self, awaitable: Awaitable[T]) -> T:
        """Await, say, a place in a queue. Cancels it and raises ClientGone when the client goes."""
        waiting = asyncio.ensure_future(awaitable)
        self.on_gone(waiting.cancel)
        try:
            return await waiting
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self.gone and not (current and current.cancelling()):
                raise ClientGone("the client has gone") from None
            raise
        finally:
            self.on_gone(None)

    async def _watch(self, receive: Receive) -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except Exception:
            logger.warning("a client can't be heard any more; taking it for gone", exc_info=True)
        self.gone = True
        if self._on_gone is not None:
            self._on_gone()


class _SuspendedSend:
    """Awaitable: the rest of a `send` whose first step ran outside of any task."""

    def __init__(self, steps: Generator[Any, None, None], awaited: object) -> None:
        self._steps = steps
        self._awaited = awaited

    def __await__(self) -> Generator[Any, None, None]:
        # `yield from` would begin with a step of its own, but the first one has been made: what it awaits
        # comes first.
        awaited = self._awaited
        while True:
            thrown: BaseException | None = None
            try:
                yield awaited
            except BaseException as error:  # what ends the wait, a cancellation too, is for `send` to see
                thrown = error
            try:
                awaited = self._steps.send(None) if thrown is None else self._steps.throw(thrown)
            except StopIteration:
                return

    def close(self) -> None:
        self._steps.close()


def _body(chunk: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": chunk, "more_body": more}
