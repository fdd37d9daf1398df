"""The cache actor's Unix socket: engines connect, register and ask."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from pathlib import Path

import msgspec

from cache_store.engine_store import Store
from cache_store.private_socket import PrivateSocket, peer_uid
from cache_store.store_connection import Connection, SocketCounters

__all__ = ["SocketCounters", "SocketStats", "Store", "StoreServer"]

logger = logging.getLogger(__name__)

_WARNING_PERIOD_S = 10.0
_ACCEPT_PAUSE_S = 0.5


class SocketStats(msgspec.Struct, frozen=True):
    """A moment of a server."""

    connections: int
    open_requests: int
    """Loads and saves that the store works on, those of connections that have ended included."""
    staging_bytes: int
    counters: SocketCounters


class StoreServer:
    """Serves one store to the engines of this node. Belongs to one event loop. Call order: `start`, `close`.

    Whatever an engine sends, the worst that happens is that its connection ends and is counted.
    """

    def __init__(
        self,
        store: Store,
        path: Path,
        *,
        node: str,
        max_connections: int = 256,
        max_staging_bytes: int = 16 * 1024**3,
        register_timeout_s: float = 5.0,
    ) -> None:
        """`path` is the socket's, alone in its folder; `node` is told to engines."""
        self.path = path
        self._store = store
        self._node = node
        self._max_connections = max_connections
        self._max_staging_bytes = max_staging_bytes
        self._register_timeout_s = register_timeout_s
        self._listener: PrivateSocket | None = None
        self._connections: set[Connection] = set()
        self._ending: set[asyncio.Task[None]] = set()
        """Requests of connections that have ended."""
        self._counters = SocketCounters()
        self._warned = -_WARNING_PERIOD_S
        self._unwarned = 0

    def start(self) -> None:
        """Listen from now on. Raises what `PrivateSocket` does."""
        self._loop = asyncio.get_running_loop()
        self._listener = PrivateSocket(self.path)
        self._loop.add_reader(self._listener.socket, self._accept)

    async def close(self, drain_s: float = 5.0) -> None:
        """End all connections; wait for the store's work on their slots, then cancel it. Safe to call twice."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener.socket)
            self._listener.close()
            self._listener = None
        for connection in list(self._connections):
            connection.end()
        if self._ending:
            _, late = await asyncio.wait(self._ending, timeout=drain_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=drain_s)

    def stats(self) -> SocketStats:
        return SocketStats(
            connections=len(self._connections),
            open_requests=sum(len(c.requests) for c in self._connections) + len(self._ending),
            staging_bytes=sum(connection.staging_bytes for connection in self._connections),
            counters=msgspec.structs.replace(self._counters),
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when the structures contradict themselves or each other."""
        for connection in self._connections:
            connection.check_integrity()
        assert len(self._connections) <= self._max_connections

    def _accept(self) -> None:
        """One connection; the loop calls again while others wait."""
        listener = self._listener
        if listener is None:
            return
        try:
            sock, _ = listener.socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            self._warn("no connection can be taken now", error)
            self._loop.remove_reader(listener.socket)
            self._loop.call_later(_ACCEPT_PAUSE_S, self._accept_again)
            return
        uid = peer_uid(sock)
        if uid != os.geteuid():
            self._counters.foreign += 1
            self._turn_away(sock, f"it is of user {uid}")
        elif len(self._connections) >= self._max_connections:
            self._counters.crowded += 1
            self._turn_away(sock, f"there are {self._max_connections} already")
        else:
            self._counters.accepted += 1
            self._connect(sock)

    def _accept_again(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener.socket, self._accept)

    def _turn_away(self, sock: socket.socket, reason: str) -> None:
        sock.close()
        self._warn(f"a connection is closed at once: {reason}", None)

    def _connect(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        connection = Connection(
            sock,
            self._store,
            node=self._node,
            counters=self._counters,
            register_timeout_s=self._register_timeout_s,
            max_staging_bytes=self._max_staging_bytes,
            warn=self._warn,
            on_end=self._on_end,
        )
        self._connections.add(connection)

    def _on_end(self, connection: Connection) -> None:
        self._connections.discard(connection)
        for task in connection.requests:
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _warn(self, text: str, error: BaseException | None) -> None:
        now = time.monotonic()
        if now - self._warned < _WARNING_PERIOD_S:
            self._unwarned += 1
            return
        more = f" ({self._unwarned} more before this)" if self._unwarned else ""
        logger.warning("%s: %s%s", self.path, text, more, exc_info=error)
        self._warned, self._unwarned = now, 0
