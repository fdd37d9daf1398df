"""Two replicas that cost next to nothing: prebuilt server-sent events at a given pace, on two ports of one process.

    python -m benchmarks.fake_backend fake-0 fake-1        the cluster's secret in $MANTA_SECRET

Prints one JSON line, id -> port, and serves until its standard input ends. To a router of Manta each is a replica
with an event stream and an empty cache; to any other client it is an OpenAI server. `POST /pace?chunks=200&ms=20` to
either port sets how many events an answer has, and the milliseconds between them, for requests from then on.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast
from urllib.parse import parse_qs, urlsplit

import httptools
import uvloop

from cache_store.events import PROTOCOL_VERSION, Hello, Load, Snapshot, encode_frame
from workers.messages import EVENTS_PATH, SECRET_HEADER

MODEL = "sim"
COMPLETIONS_PATH = "/v1/completions"
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1750000000,'
    b'"model":"sim","choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null,'
    b'"stop_reason":null}],"usage":null}\n\n'
)
DONE = b"data: [DONE]\n\n"
_LOAD_PERIOD_S = 0.5
_CHUNK_TOKENS = 256
_IDLE = Load(waiting=0, running=0, prefill_tokens=0, kv_used=0.0, prefill_rate=0.0, decode_rate=0.0)


@dataclass
class Pace:
    chunks: int = 1
    interval_s: float = 0.0


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_CHUNK = chunk(EVENT)
_LAST = chunk(EVENT + DONE) + b"0\r\n\r\n"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"x-manta-cached: hbm=0,dram=0,disk=0,computed=1024\r\ntransfer-encoding: chunked\r\n\r\n"
)
_EVENTS_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)


class FakeReplica(asyncio.Protocol):
    """One connection."""

    def __init__(self, replica: str, pace: Pace, secret: str) -> None:
        self._replica = replica
        self._pace = pace
        self._secret = secret.encode()
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # smg asks for gRPC first
            self._transport.close()

    # httptools calls these.

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_message_complete(self) -> None:
        url, headers = urlsplit(self._url.decode()), self._headers
        self._url, self._headers = b"", {}
        if url.path == COMPLETIONS_PATH:
            self._stream()
        elif url.path == EVENTS_PATH:
            self._events(headers)
        elif url.path == "/pace":
            given = parse_qs(url.query)
            self._pace.chunks = int(given["chunks"][0])
            self._pace.interval_s = float(given["ms"][0]) / 1000
            self._whole(b"200 OK", {})
        elif url.path in ("/health", "/health_generate"):
            self._whole(b"200 OK", {})
        elif url.path == "/v1/models":
            models = [{"id": MODEL, "object": "model", "created": 1, "owned_by": "bench", "root": MODEL}]
            self._whole(b"200 OK", {"object": "list", "data": models})
        else:
            self._whole(b"404 Not Found", {"error": f"no {url.path} here"})

    def _whole(self, status: bytes, value: object) -> None:
        body = json.dumps(value).encode()
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % (status, len(body)) + body)

    def _stream(self) -> None:
        left, interval = self._pace.chunks, self._pace.interval_s
        if left == 1:
            self._transport.write(_STREAM_HEAD + _LAST)
            return
        due = self._loop.time()
        self._transport.write(_STREAM_HEAD + _CHUNK)

        def on_due() -> None:
            nonlocal left, due
            left -= 1
            if left == 1:
                self._transport.write(_LAST)
                return
            self._transport.write(_CHUNK)
            due += interval
            self._timer = self._loop.call_at(due, on_due)

        due += interval
        self._timer = self._loop.call_at(due, on_due)

    def _events(self, headers: dict[bytes, bytes]) -> None:
        if headers.get(SECRET_HEADER.encode()) != self._secret:
            self._whole(b"401 Unauthorized", {"error": "the cluster's secret is missing or wrong"})
            return
        hello = Hello(PROTOCOL_VERSION, self._replica, 1, bytes(32), _CHUNK_TOKENS)
        opening = encode_frame(hello) + encode_frame(Snapshot(0, "hbm", b"")) + encode_frame(_IDLE)
        self._transport.write(_EVENTS_HEAD + chunk(opening))
        again = chunk(encode_frame(_IDLE))

        def report() -> None:
            self._transport.write(again)
            self._timer = self._loop.call_later(_LOAD_PERIOD_S, report)

        self._timer = self._loop.call_later(_LOAD_PERIOD_S, report)


async def serve(replicas: list[str], secret: str, announce: Callable[[str], object]) -> None:
    """Until standard input ends."""
    loop, pace, ports = asyncio.get_running_loop(), Pace(), {}
    for replica in replicas:
        server = await loop.create_server(partial(FakeReplica, replica, pace, secret), "127.0.0.1", 0)
        ports[replica] = server.sockets[0].getsockname()[1]
    announce(json.dumps(ports))
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    def announce(line: str) -> None:
        print(line, flush=True)

    uvloop.run(serve(sys.argv[1:], os.environ["MANTA_SECRET"], announce))


if __name__ == "__main__":
    main()
