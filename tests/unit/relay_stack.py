"""Uvicorn around the relay, between a raw replica and a raw client."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from functools import partial

import uvicorn
from raw_replica import Answer, RawReplica, RawRequest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from router.client import ClientGone, ClientWatch
from router.config import LimitsConfig
from router.exchange import Exchange, Tap
from router.relay import Relay
from router.upstream import Address, UpstreamError


class Ingress:
    """The least that an ingress does around the relay: read the body, watch the client, answer 502."""

    def __init__(self, address: Address, relay: Relay) -> None:
        self.address = address
        self.relay = relay
        self.tap: Tap | None = None
        self.exchanges: list[Exchange] = []
        self.errors: list[Exception] = []
        self.tasks: list[bool] = []
        """Per piece of body sent to the client: whether a task ran."""
        self.watched: list[ClientWatch] = []

    async def __call__(self, scope, receive, send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]

        async def noting(message) -> None:
            if message["type"] == "http.response.body":
                self.tasks.append(asyncio.current_task() is not None)
            await send(message)

        exchange = self.relay.exchange(scope, body, self.address, tap=self.tap)
        self.exchanges.append(exchange)
        with ClientWatch(receive) as watch:
            self.watched.append(watch)
            watch.on_gone(exchange.close)
            try:
                await exchange.start()
            except ClientGone as error:
                self.errors.append(error)
                return
            except UpstreamError as error:
                self.errors.append(error)
                await send(
                    {"type": "http.response.start", "status": 502, "headers": [(b"content-length", b"0")]}
                )
                await send({"type": "http.response.body"})
                return
            try:
                await exchange.stream(noting, [(b"x-manta-replica", b"r1")])
            except ClientGone as error:
                self.errors.append(error)
            except Exception as error:
                self.errors.append(error)
                raise


class Stack:
    """A raw replica, and uvicorn serving an Ingress in front of it."""

    def __init__(self, replica: RawReplica, ingress: Ingress, port: int) -> None:
        self.replica = replica
        self.ingress = ingress
        self.port = port

    @property
    def exchange(self) -> Exchange:
        return self.ingress.exchanges[-1]

    @property
    def request(self) -> RawRequest:
        return self.replica.requests[-1]

    async def ask(self, method: bytes = b"POST", body: bytes = b"{}") -> Reply:
        client = await Client.connect(self.port)
        await client.send(method, body)
        reply = await client.reply(method)
        client.close()
        return reply


class Reply:
    def __init__(self, status: int, headers: dict[bytes, bytes], body: bytes, whole: bool) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.whole = whole
        """Whether the framing says that nothing is missing."""


class Client:
    """A client that sees framing. `receive_buffer` keeps the kernel from reading ahead for it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, receive_buffer: int = 0) -> Client:
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=sock, limit=1 << 16))

    async def send(self, method: bytes = b"POST", body: bytes = b"{}") -> None:
        self.writer.write(
            b"%s /v1/x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (method, len(body)) + body
        )
        await self.writer.drain()

    def close(self) -> None:
        self.writer.close()

    async def reply(self, method: bytes = b"POST") -> Reply:
        status, *lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
        body, whole = bytearray(), False
        try:
            if method == b"HEAD" or status.split()[1] == b"204":
                whole = True
            elif b"content-length" in headers:
                body += await self.reader.readexactly(int(headers[b"content-length"]))
                whole = True
            else:
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    body += (await self.reader.readexactly(size + 2))[:-2]
                assert await self.reader.readexactly(2) == b"\r\n"
                whole = True
        except asyncio.IncompleteReadError as error:
            body += error.partial
        return Reply(int(status.split()[1]), headers, bytes(body), whole)


@asynccontextmanager
async def stack(answer: Answer, *, held_bytes: int = 1 << 20, **limits: float):
    relay = Relay(LimitsConfig(**limits), held_bytes=held_bytes)
    async with RawReplica(answer) as replica:
        ingress = Ingress(replica.address, relay)
        config = uvicorn.Config(
            ingress, http="httptools", lifespan="off", log_level="critical", access_log=False
        )
        config.load()
        serve = partial(HttpToolsProtocol, config=config, server_state=ServerState(), app_state={})
        server = await asyncio.get_running_loop().create_server(serve, "127.0.0.1", 0)
        try:
            yield Stack(replica, ingress, server.sockets[0].getsockname()[1])
            relay.pool.check_integrity()
        finally:
            server.close()
            relay.close()
