"""Simulated time: what is to happen, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Event = Callable[[], None]


class Events:
    """A heap of events; of those at one time, in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._order = 0

    def later(self, at_s: float, event: Event) -> None:
        self._order += 1
        heapq.heappush(self._events, (at_s, self._order, event))

    def run(self, done: Callable[[], bool]) -> None:
        """Until nothing is left to happen, or `done` says after an event that nothing else matters."""
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()
            if done():
                return
