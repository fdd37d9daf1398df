"""Asking a replica of the prefill pool for a prompt's KV, and telling it that nobody needs that any more."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from router.exchange import Exchange
from router.relay import Relay
from router.upstream import Address, ConnectFailed, UpstreamError, UpstreamTimeout
from workers.messages import (
    HANDOVERS_PATH,
    HELD,
    REFUSED,
    SECRET_HEADER,
    Handover,
    HandoverError,
    unpack_handover,
)

logger = logging.getLogger(__name__)

MARGIN_S = 3.0
"""Fetching must begin so long before the blocks are freed, to be over by then."""
_NOT_THE_CLIENTS = frozenset({401, 403, 408, 409, 429})
"""Of 4xx, those that speak of the replica."""
_END_LIMIT_S = 5.0


class Kept(NamedTuple):
    """A prefill replica has computed the prompt and keeps its KV."""

    handover: Handover
    since: float
    """`time.monotonic` when this was heard."""

    def for_fetching(self, now: float) -> Handover:
        """With the time that is left to begin fetching; may be none."""
        left = self.handover.hold_s - (now - self.since) - MARGIN_S
        return msgspec.structs.replace(self.handover, hold_s=max(0.0, left))


class NotKept(NamedTuple):
    """Who answers computes the prompt itself."""

    reason: str
    """Label of a metric: `connect`, `timeout`, `died`, `refused`, `failed`."""
    error: UpstreamError | None = None


class ClientsOwn(NamedTuple):
    """The request is one that no replica takes: `exchange` holds what to tell the client."""

    exchange: Exchange


FirstHalf = Kept | NotKept | ClientsOwn


async def first_half(exchange: Exchange) -> FirstHalf:
    """Have the prompt computed. `exchange` must carry HANDOVER_HEADER; the caller closes it.

    Raises ClientGone when it is closed meanwhile.
    """
    try:
        head = await exchange.start()
        if 400 <= head.status < 500 and head.handover is None and head.status not in _NOT_THE_CLIENTS:
            return ClientsOwn(exchange)
        body = _Body()
        await exchange.stream(body)
    except UpstreamTimeout as error:
        return NotKept("timeout", error)
    except ConnectFailed as error:
        return NotKept("connect", error)
    except UpstreamError as error:
        return NotKept("died", error)
    if head.handover == HELD:
        try:
            return Kept(unpack_handover(bytes(body.data)), time.monotonic())
        except HandoverError as error:
            logger.warning("replica %s: %s", exchange.address, error)
    if head.handover == REFUSED:
        logger.debug("replica %s: %s", exchange.address, bytes(body.data[:200]).decode(errors="replace"))
        return NotKept("refused")
    return NotKept("failed")


@dataclass
class _Body:
    """An ASGI `send` that keeps what it is sent."""

    def __post_init__(self) -> None:
        self.data = bytearray()

    async def __call__(self, message: Mapping[str, Any]) -> None:
        self.data += message.get("body", b"")


class Ends:
    """Tells replicas, in the background, that hand-overs are over. One that is not reached frees them itself."""

    def __init__(self, relay: Relay, secret: str) -> None:
        self._relay = relay
        self._secret = secret
        self._tasks: set[asyncio.Task[None]] = set()

    def end(self, address: str, name: str) -> None:
        """The KV is freed now, or once it is computed, unless it has been when it was fetched."""
        task = asyncio.create_task(self._end(Address.parse(address), name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def open(self) -> int:
        return len(self._tasks)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _end(self, address: Address, name: str) -> None:
        scope: dict[str, Any] = {
            "method": "DELETE",
            "path": HANDOVERS_PATH + name,
            "query_string": b"",
            "headers": [],
        }
        secret = [(SECRET_HEADER.encode(), self._secret.encode())]
        with closing(
            self._relay.exchange(scope, b"", address, internal=secret, first_token_timeout_s=_END_LIMIT_S)
        ) as exchange:
            try:
                await exchange.start()
            except UpstreamError as error:
                logger.debug("hand-over %s was not ended: %s", name, error)
