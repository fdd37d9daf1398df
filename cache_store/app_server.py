"""The HTTP server of a process that hosts applications: one uvicorn, with a socket for each of them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send


class AppServer:
    """Serves each application on a port of its own. Call order: start, stop."""

    def __init__(
        self, apps: Sequence[ASGIApp], sockets: Sequence[socket.socket], keep_alive_s: int = 75
    ) -> None:
        """Each application answers at the bound socket of the same place; they are the server's from here on."""
        self._sockets = list(sockets)
        self.addresses = [_address(sock) for sock in sockets]
        """`host:port` of each application, in their order."""
        self._apps = {sock.getsockname()[1]: app for sock, app in zip(sockets, apps, strict=True)}
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._dispatch,
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=keep_alive_s,
                ws="none",
                interface="asgi3",
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns once connections are taken. Raises RuntimeError when the server stops instead."""
        # Not `serve`, which would take over the process's signal handlers.
        self._serving = asyncio.create_task(self._server._serve(self._sockets))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the HTTP server stopped while starting")
            await asyncio.sleep(0.001)

    @property
    def stopped(self) -> bool:
        """Whether it was started and serves no more."""
        return self._serving is not None and self._serving.done()

    @property
    def connections(self) -> int:
        """Open connections, idle ones included."""
        return len(self._server.server_state.connections)

    def begin_stop(self) -> None:
        """Take no more connections, and end when the open ones are through."""
        self._server.should_exit = True

    async def stop(self) -> None:
        """End at once: connections are reset, whatever they are in, and their requests see their client gone."""
        # Uvicorn's own way to end takes a fifth of a second and lets connections finish what they are in.
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        for server in getattr(self._server, "servers", ()):
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        for sock in self._sockets:
            sock.close()

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._apps[scope["server"][1]](scope, receive, send)


def bound_socket(host: str, port: int = 0) -> socket.socket:
    """Not listening yet. Port 0 is any free one."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    return sock


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
