"""Makes the exchanges of one router, and keeps the connections that they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from router.config import LimitsConfig
from router.connection_pool import ConnectionPool
from router.exchange import Exchange, Tap
from router.headers import request_head
from router.upstream import Address

MAX_HELD_BYTES = 8 * 1024 * 1024
"""An answer that is no event stream is held whole up to this size before any of it goes to the client."""
MAX_IDLE_PER_REPLICA = 64
IDLE_EXPIRY_S = 4.0
"""Below uvicorn's 5 s of keep-alive, so that a connection is seldom found stale."""


class Relay:
    """May be pickled until its first exchange: from then on it belongs to a process and an event loop."""

    def __init__(
        self,
        limits: LimitsConfig,
        *,
        held_bytes: int = MAX_HELD_BYTES,
        max_idle: int = MAX_IDLE_PER_REPLICA,
        idle_expiry_s: float = IDLE_EXPIRY_S,
    ) -> None:
        self.limits = limits
        """May be replaced at any time; holds for exchanges made from then on."""
        self._held_bytes = held_bytes
        self._max_idle = max_idle
        self._idle_expiry_s = idle_expiry_s
        self._pool: ConnectionPool | None = None

    @property
    def pool(self) -> ConnectionPool:
        """Made on first use, inside the running loop."""
        if self._pool is None:
            self._pool = ConnectionPool(max_idle=self._max_idle, idle_expiry_s=self._idle_expiry_s)
        return self._pool

    def exchange(
        self,
        scope: Mapping[str, Any],
        body: bytes,
        address: Address,
        *,
        internal: Iterable[tuple[bytes, bytes]] = (),
        first_token_timeout_s: float | None = None,
        tap: Tap | None = None,
    ) -> Exchange:
        """Forward the request of ASGI `scope` with `body` to the replica at `address`, with `internal`
        headers.

        Nothing is sent before `Exchange.start`. `first_token_timeout_s` replaces the limit where a whole
        answer, not a first token, is waited for. Raises ValueError for a request that can't be framed: 400,
        on any replica.
        """
        head = request_head(scope, address, len(body), internal)
        return Exchange(
            self.pool,
            address,
            (head, body) if body else (head,),
            self.limits,
            head_only=scope["method"] == "HEAD",
            held_bytes=self._held_bytes,
            first_token_timeout_s=first_token_timeout_s,
            tap=tap,
        )

    def forget(self, address: Address) -> None:
        """A replica is gone: close what is idle to it."""
        if self._pool is not None:
            self._pool.forget(address)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
