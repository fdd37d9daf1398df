"""When the files of a tier are listed, and when a tier that failed is tried again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from cache_store.chunk_path import Stored
from cache_store.events import Tier
from cache_store.threads import Threads
from cache_store.tier_health import TierUnavailable

logger = logging.getLogger(__name__)

SCAN_AGAIN_S = 5.0
TAKEN_AT_ONCE = 500


class Stock(Protocol):
    """What is listed: a `Shelf`. `scan` and `probe` block; they raise OSError, ValueError or TierUnavailable."""

    tier: Tier

    @property
    def working(self) -> bool: ...

    def scan(self) -> list[Stored]: ...

    def probe(self) -> bool: ...

    def take_in(self, found: Iterable[Stored]) -> None: ...


class Stocktaking:
    """Lists until that worked once, and from then on every `rescan_s`, if at all. Belongs to the store's loop."""

    def __init__(
        self, stock: Stock, threads: Threads, clock: Callable[[], float], rescan_s: float | None
    ) -> None:
        self._stock = stock
        self._threads = threads
        self._clock = clock
        self._rescan_s = rescan_s
        self._scan_at: float | None = clock()
        self._task: asyncio.Task[None] | None = None

    @property
    def under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    async def start(self, limit_s: float) -> None:
        """Returns when everything is taken in, or after `limit_s`; it then goes on."""
        self.tend()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=limit_s)

    def tend(self) -> None:
        """Begin what is due, one thing at a time."""
        if self.under_way:
            return
        loop = asyncio.get_running_loop()
        if self._scan_at is not None and self._clock() >= self._scan_at:
            self._task = loop.create_task(self._scan())
        elif not self._stock.working:
            self._task = loop.create_task(self._probe())

    async def _scan(self) -> None:
        try:
            found = await self._threads.finish(None, self._stock.scan)
        except (TierUnavailable, OSError, ValueError) as error:
            self._scan_at = self._clock() + SCAN_AGAIN_S
            logger.warning("%s can't be listed, which is tried again: %s", self._stock.tier, error)
            return
        self._scan_at = None if self._rescan_s is None else self._clock() + self._rescan_s
        # In slices, so that the loop goes on; each is forgotten, so that a million chunks need no room twice.
        found.reverse()
        while found:
            self._stock.take_in(found.pop() for _ in range(min(len(found), TAKEN_AT_ONCE)))
            await asyncio.sleep(0)

    async def _probe(self) -> None:
        try:
            await self._threads.finish(None, self._stock.probe)
        except (TierUnavailable, OSError, ValueError) as error:
            logger.info("%s does not work yet: %s", self._stock.tier, error)

    async def settle(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    async def close(self, limit_s: float) -> None:
        self._scan_at = None
        if self._task is not None:
            await asyncio.wait([self._task], timeout=limit_s)
            self._task.cancel()
