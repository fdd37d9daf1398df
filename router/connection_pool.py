"""Idle keep-alive connections to replicas."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from router.upstream import Address, ConnectFailed, Connection


class _Idle(NamedTuple):
    connection: Connection
    expires: float


class ConnectionPool:
    """Idle connections by address. One per process and event loop: create it inside the running loop."""

    def __init__(self, *, max_idle: int, idle_expiry_s: float) -> None:
        self._max_idle = max_idle
        self._idle_expiry_s = idle_expiry_s
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Address, list[_Idle]] = {}
        """Oldest first; only non-empty lists."""
        self._sweeper: asyncio.TimerHandle | None = None

    def take(self, address: Address) -> Connection | None:
        """The one that rested last, so that few stay warm; None where none rests. It may be stale."""
        while entries := self._idle.get(address):
            connection, expires = entries.pop()
            if not entries:
                del self._idle[address]
            if not connection.closing and expires > self._loop.time():
                return connection
            connection.abort()
        return None

    async def connect(self, address: Address, timeout_s: float) -> Connection:
        """A fresh connection. Raises ConnectFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await self._loop.create_connection(lambda: Connection(address), *address)
        except TimeoutError as error:
            raise ConnectFailed(address, f"took no connection in {timeout_s} s") from error
        except OSError as error:
            raise ConnectFailed(address, f"can't be reached: {error}") from error
        return connection

    def release(self, connection: Connection) -> None:
        """Keep the connection for another exchange if it can serve one; close it otherwise."""
        if not connection.reusable or self.idle(connection.address) >= self._max_idle:
            connection.abort()
            return
        connection.rest(self._drop)
        entry = _Idle(connection, self._loop.time() + self._idle_expiry_s)
        self._idle.setdefault(connection.address, []).append(entry)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(self._idle_expiry_s, self._sweep)

    def idle(self, address: Address) -> int:
        """Connections at rest."""
        return len(self._idle.get(address, ()))

    def forget(self, address: Address) -> None:
        """Close what is idle to a replica that is gone."""
        for connection, _ in self._idle.pop(address, ()):
            connection.abort()

    def close(self) -> None:
        for address in tuple(self._idle):
            self.forget(address)
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def check_integrity(self) -> None:
        """Raises AssertionError where the pool's books do not fit."""
        connections = [entry.connection for entries in self._idle.values() for entry in entries]
        assert len(set(map(id, connections))) == len(connections), "a connection rests twice"
        assert all(not c.closing and not c.paused for c in connections), "a dead one rests"
        assert not connections or self._sweeper, "idle connections would never expire"
        for address, entries in self._idle.items():
            assert 0 < len(entries) <= self._max_idle, f"{len(entries)} connections rest for {address}"
            assert all(entry.connection.address == address for entry in entries), (
                "one rests at another's place"
            )
            expiries = [entry.expires for entry in entries]
            assert expiries == sorted(expiries), "the oldest is not first"

    def _drop(self, connection: Connection) -> None:
        rest = [
            entry for entry in self._idle.pop(connection.address, []) if entry.connection is not connection
        ]
        if rest:
            self._idle[connection.address] = rest

    def _sweep(self) -> None:
        self._sweeper = None
        now = self._loop.time()
        expired = [entry for entries in self._idle.values() for entry in entries if entry.expires <= now]
        for entry in expired:
            self._drop(entry.connection)
            entry.connection.abort()
        if self._idle:
            soonest = min(entries[0].expires for entries in self._idle.values())
            self._sweeper = self._loop.call_at(soonest, self._sweep)
