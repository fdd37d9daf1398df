"""Single flight: of all who want the same thing at once, one fetches it and the others wait for that."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Flights(Generic[K, V]):
    """Tasks by name, at most one of a name at a time. Belongs to one event loop.

    A flight is nobody's: whoever waits for one may leave, and it goes on.
    """

    def __init__(self) -> None:
        self._flights: dict[K, asyncio.Task[V]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, name: K) -> bool:
        return name in self._flights

    def get(self, name: K) -> asyncio.Task[V] | None:
        return self._flights.get(name)

    def start(self, name: K, journey: Coroutine[Any, Any, V]) -> asyncio.Task[V]:
        """`name` must not be in flight. What `journey` raises goes to those who wait."""
        assert name not in self._flights
        flight = self._flights[name] = asyncio.get_running_loop().create_task(journey)
        flight.add_done_callback(lambda done: self._land(name, done))
        return flight

    def _land(self, name: K, flight: asyncio.Task[V]) -> None:
        del self._flights[name]
        if not flight.cancelled():
            flight.exception()

    async def close(self, limit_s: float) -> None:
        """Wait for all to land; cancel those that have not within `limit_s`."""
        if self._flights:
            _, late = await asyncio.wait(self._flights.values(), timeout=limit_s)
            for flight in late:
                flight.cancel()
            if late:
                await asyncio.wait(late, timeout=limit_s)

    async def settle(self) -> None:
        """Wait until nothing is in flight."""
        while self._flights:
            await asyncio.wait(self._flights.values())


async def arrival(flight: asyncio.Task[V], limit_s: float) -> V:
    """What a flight brings. Raises TimeoutError when it has not landed within `limit_s`; it flies on."""
    done, _ = await asyncio.wait([flight], timeout=limit_s)
    if not done:
        raise TimeoutError
    return flight.result()


async def settled(end: asyncio.Future[V]) -> None:
    """Wait for the end of a future, however often the waiting task is cancelled; cancelled afterwards if it was."""
    cancelled = False
    while not end.done():
        try:
            await asyncio.wait([end])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
