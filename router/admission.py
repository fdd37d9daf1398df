"""Requests that wait for a replica with room: a bounded queue, first come, first served.

Requests that can use different replicas stand in different lines, so that one that nobody can serve now holds
up only its like. When something changes, the first of each line are called, one at a time, who came first
before the others. Who is called tries in its own task, and what it gets is returned in the same step: there
is no moment in which a place is taken but the waiter can still be cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")


class QueueFullError(Exception):
    """As many requests wait as may. `retry_after_s` tells the client when trying again makes sense."""

    def __init__(self, waiting: int, limit: int, retry_after_s: float) -> None:
        super().__init__(f"{waiting} requests wait for a replica, the limit is {limit}")
        self.retry_after_s = retry_after_s


class QueueTimeoutError(Exception):
    """No replica had room in time."""

    def __init__(self, waited_s: float, retry_after_s: float) -> None:
        super().__init__(f"no replica had room within {waited_s:g} s")
        self.waited_s = waited_s
        self.retry_after_s = retry_after_s


class _Waiter:
    __slots__ = ("since", "ticket", "turn", "wants")

    def __init__(self, ticket: int, wants: Hashable, since: float) -> None:
        self.ticket = ticket
        self.wants = wants
        self.since = since
        self.turn = asyncio.Event()


class WaitingRoom:
    """The queue of one router. Lives on one event loop; `wake` is called on that loop."""

    def __init__(self, max_waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_waiting = max_waiting
        """Live: lowering it refuses newcomers and leaves alone who waits already."""
        self._clock = clock
        self._tickets = 0
        self._lines: dict[Hashable, OrderedDict[int, _Waiter]] = {}
        self._called: _Waiter | None = None
        self._in_vain: set[Hashable] = set()
        """Lines whose first has tried since the last change."""
        self._last_wait_s = 0.0

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    async def enter(self, try_place: Callable[[], T | None], timeout_s: float, wants: Hashable = None) -> T:
        """Return what `try_place` returns once that is not None. Await it directly, not through another task.

        `try_place` takes a place if there is one and must not block. It is called at once when nobody is
        before the caller, then when the caller is first in its line and `wake` was called; what it raises
        ends the wait. `wants` names the line: callers that could use the same replicas give equal values.
        Raises QueueFullError, and QueueTimeoutError after `timeout_s` seconds. A cancelled caller leaves
        nothing.
        """
        if self._called is None and wants not in self._lines:
            placed = try_place()
            if placed is not None:
                return placed
        if len(self) >= self.max_waiting:
            raise QueueFullError(len(self), self.max_waiting, self.retry_after_s())
        self._tickets += 1
        waiter = _Waiter(self._tickets, wants, self._clock())
        self._lines.setdefault(wants, OrderedDict())[waiter.ticket] = waiter
        try:
            return await self._wait(waiter, try_place, timeout_s)
        finally:
            self._leave(waiter)

    def wake(self) -> None:
        """Capacity or replicas changed: the first of every line tries again, while places are found."""
        self._in_vain.clear()
        self._call_next()

    def retry_after_s(self) -> float:
        """As long as the longest has waited by now, or the last one to leave had; at least a second."""
        longest = min(self._heads(), key=lambda waiter: waiter.ticket, default=None)
        if longest is None:
            return 1.0
        return max(1.0, self._clock() - longest.since, self._last_wait_s)

    def check_integrity(self) -> None:
        """Raises AssertionError for a line empty or out of order, or a call to one who is not first."""
        for wants, line in self._lines.items():
            tickets = list(line)
            assert tickets, f"the line for {wants} is empty"
            assert tickets == sorted(tickets), f"out of order: {tickets}"
            assert tickets[-1] <= self._tickets
        if self._called is not None:
            assert self._called in self._heads(), f"{self._called.ticket} is called and not first"
            assert self._called.turn.is_set(), f"{self._called.ticket} is called and does not know"
        assert self._in_vain <= self._lines.keys()

    def _heads(self) -> list[_Waiter]:
        return [next(iter(line.values())) for line in self._lines.values()]

    def _call_next(self) -> None:
        eligible = [waiter for waiter in self._heads() if waiter.wants not in self._in_vain]
        self._called = min(eligible, key=lambda waiter: waiter.ticket, default=None)
        if self._called is not None:
            self._called.turn.set()

    async def _wait(self, waiter: _Waiter, try_place: Callable[[], T | None], timeout_s: float) -> T:
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                while True:
                    await waiter.turn.wait()
                    waiter.turn.clear()
                    if self._called is not waiter:
                        continue  # a change put someone before this one
                    self._called = None
                    placed = try_place()
                    if placed is not None:
                        return placed
                    self._in_vain.add(waiter.wants)
                    self._call_next()
        except TimeoutError:
            if not deadline.expired():
                raise
            waited_s = self._clock() - waiter.since
            raise QueueTimeoutError(waited_s, self.retry_after_s()) from None

    def _leave(self, waiter: _Waiter) -> None:
        line = self._lines[waiter.wants]
        del line[waiter.ticket]
        if not line:
            del self._lines[waiter.wants]
        self._last_wait_s = self._clock() - waiter.since
        # Whoever leaves passes the turn on: the next one may fit where this one was called for.
        self.wake()
