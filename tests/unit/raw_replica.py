"""A replica whose every byte the test writes itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

from router.upstream import Address

DEADLINE_S = 20.0


class RawRequest:
    """One request that reached the replica, and the means to answer it."""

    def __init__(
        self, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.line, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        self.path = self.line.split(" ")[1]
        self.headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
        self.body = body
        self.written = 0
        self.blocked = False
        """A write waits for the other side to read."""
        self.connection_gone = False
        self._reader = reader
        self._writer = writer

    async def write(self, data: bytes) -> None:
        self._writer.write(data)
        self.blocked = True
        await self._writer.drain()
        self.blocked = False
        self.written += len(data)

    async def write_each(self, pieces: list[bytes]) -> None:
        """Each as a segment of its own, as far as the loop can tell."""
        for piece in pieces:
            await self.write(piece)
            await asyncio.sleep(0)

    def abort(self) -> None:
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()

    async def until_gone(self) -> None:
        """Until the other side has ended the connection."""
        try:
            while await self._reader.read(1024):
                pass
        except ConnectionError:
            pass
        self.connection_gone = True


Answer = Callable[[RawRequest], Awaitable[None]]


class RawReplica:
    """Listens on a free port of 127.0.0.1 and calls `answer` for every request, keep-alive."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[RawRequest] = []
        self.connections = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = Address(*self._server.sockets[0].getsockname()[:2])
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop_connections(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                size = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(size[0].split(b":")[1])) if size else b""
                request = RawRequest(head, body, reader, writer)
                self.requests.append(request)
                await self.answer(request)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def replies(*pieces: bytes) -> Answer:
    """Answers every request with the same bytes."""

    async def answer(request: RawRequest) -> None:
        await request.write_each(list(pieces))

    return answer


async def until(condition: Callable[[], object], what: str) -> None:
    """Let the loop run until `condition()` holds. Fails after a deadline."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S
    while not condition():
        assert loop.time() < deadline, f"never came: {what}"
        await asyncio.sleep(0.001)
