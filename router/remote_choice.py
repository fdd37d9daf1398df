"""Decisions for callers that are not this router's HTTP clients: Ray Serve handle calls."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import msgspec

from router.core import Placed, Query, RouterCore
from router.decision_log import Measured
from router.render import Renderer
from router.session import session_of
from workers.messages import pack_reservation

TICKET_LIFE_S = 3600.0
"""A caller that died never releases; its reservation must not weigh on a replica for ever."""
MAX_TICKETS = 100_000


class _Ticket(NamedTuple):
    placed: Placed
    since: float


class RemoteChoices:
    """Reservations by ticket. Lives on the router's event loop."""

    def __init__(
        self, core: RouterCore, renderer: Renderer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core = core
        self._renderer = renderer
        self._clock = clock
        self._tickets: dict[str, _Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    async def choose(
        self, path: str, body: dict[str, Any], exclude: Collection[str] = ()
    ) -> tuple[str, str] | None:
        """Returns (ticket, replica id), or None when no replica has room. Raises ApiError for a bad body.

        The ticket is the reservation's name, as the replica must be told of it (`RESERVATION_HEADER`)."""
        self._expire()
        data = msgspec.json.encode(body)
        rendered = await self._renderer.render(path, data)
        query = Query(uuid.uuid4().hex, rendered.model or "", rendered, "", len(data), tried=set(exclude))
        if self._core.config.policy.wants_session:
            query.session = session_of({}, data)
        placed = self._core.place(query)
        if placed is None:
            return None
        ticket = pack_reservation(placed.reservation.name)
        self._tickets[ticket] = _Ticket(placed, self._clock())
        return ticket, placed.replica.id

    def release(self, ticket: str) -> None:
        """May be called again, and for a ticket that has expired."""
        found = self._tickets.pop(ticket, None)
        if found is not None:
            measured = Measured(200, 0, None, self._clock() - found.since)
            self._core.release(found.placed, measured)

    def _expire(self) -> None:
        """Oldest first; a dict keeps the order of insertion."""
        now = self._clock()
        for ticket, entry in list(self._tickets.items()):
            if now - entry.since < TICKET_LIFE_S and len(self._tickets) < MAX_TICKETS:
                return
            self.release(ticket)
