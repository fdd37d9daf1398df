"""A load generator in a process of its own: closed loop, uvloop, httptools, prebuilt requests.

    python -m benchmarks.load

Reads one JSON `Job` a line and answers each with one JSON `Outcome`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Self, cast

import httptools
import msgspec
import uvloop

from benchmarks import peers


class Job(msgspec.Struct, frozen=True):
    """`requests` requests over `concurrency` connections, each of which sends its next as soon as it may."""

    port: int
    path: str
    body: str
    concurrency: int
    requests: int
    stagger_s: float = 0.0
    """The connections' first requests are spread over so long."""


class Outcome(msgspec.Struct, frozen=True):
    seconds: float
    events: int
    """Server-sent events received, the last one `[DONE]` included."""
    first_byte_s: list[float]
    """Per request, from its sending to the first byte of the answer's body."""
    refused: int = 0
    """Answers whose status was not 200."""


class LoadError(RuntimeError):
    """The load could not be put on, or an answer was cut."""


class LoadProcess:
    """The generator's process. A context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.load"],
            cwd=peers.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def run(self, job: Job) -> Outcome:
        """Raises LoadError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(job) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise LoadError(f"the load generator ended with {self._process.wait()}")
        outcome = msgspec.json.decode(line, type=Outcome)
        if outcome.refused:
            raise LoadError(f"{outcome.refused} of {job.requests} requests to port {job.port} were refused")
        return outcome


class Run:
    """What the connections of one job share."""

    def __init__(self, job: Job) -> None:
        self.job = job
        body = job.body.encode()
        head = (
            f"POST {job.path} HTTP/1.1\r\nhost: 127.0.0.1:{job.port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self.request = head.encode() + body
        self.left = job.requests
        self.open = job.requests
        self.events = self.refused = 0
        self.first_bytes: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(self) -> None:
        self.open -= 1
        if not self.open and not self.done.done():
            self.done.set_result(None)

    def cut(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(
                LoadError(f"port {self.job.port} closed a connection inside an answer: {error}")
            )


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._parser: httptools.HttpResponseParser
        self._busy = self._ended = self._has_body = False
        self._sent = 0.0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._busy:
            self._run.cut(exc)

    def send(self) -> None:
        """The next request, if there is one."""
        if self._run.left:
            self._run.left -= 1
            self._busy, self._ended, self._has_body = True, False, False
            self._parser = httptools.HttpResponseParser(self)
            self._sent = time.perf_counter()
            self.transport.write(self._run.request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        if self._ended:
            self._busy = False
            self._run.refused += self._parser.get_status_code() != 200
            self._run.ended()
            self.send()

    # httptools calls these.

    def on_body(self, body: bytes) -> None:
        if not self._has_body:
            self._has_body = True
            self._run.first_bytes.append(time.perf_counter() - self._sent)
        self._run.events += body.count(b"data: ")

    def on_message_complete(self) -> None:
        self._ended = True


async def perform(job: Job) -> Outcome:
    loop, run = asyncio.get_running_loop(), Run(job)
    clients = []
    for _ in range(min(job.concurrency, job.requests)):
        _, client = await loop.create_connection(lambda: Client(run), "127.0.0.1", job.port)
        clients.append(client)
    began = time.perf_counter()
    for number, client in enumerate(clients):
        loop.call_later(job.stagger_s * number / len(clients), client.send)
    try:
        await run.done
    finally:
        seconds = time.perf_counter() - began
        for client in clients:
            client.transport.abort()
    return Outcome(seconds, run.events, run.first_bytes, run.refused)


def main() -> None:
    for line in sys.stdin.buffer:
        outcome = uvloop.run(perform(msgspec.json.decode(line, type=Job)))
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
