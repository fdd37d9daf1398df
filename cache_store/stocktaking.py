"""When the files of a tier are listed, and when a tier that failed is tried again."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from typing import BinaryIO, Protocol

import msgspec

from cache_store.chunk_path import Stored
from cache_store.events import Tier
from cache_store.file_tier import FileTier
from cache_store.threads import Threads
from cache_store.tier_health import TierUnavailable

logger = logging.getLogger(__name__)

SCAN_AGAIN_S = 5.0
PACKED = 500

_decoder = msgspec.msgpack.Decoder(list[Stored])


class Stock(Protocol):
    """Where what is listed becomes known: a `Shelf`."""

    tier: Tier

    def take_in(self, found: Iterable[Stored]) -> None: ...


class Stocktaking:
    """Lists until that worked once, and from then on every `rescan_s`, if at all. Belongs to the store's loop."""

    def __init__(
        self,
        stock: Stock,
        files: FileTier,
        threads: Threads,
        clock: Callable[[], float],
        rescan_s: float | None,
    ) -> None:
        self._stock = stock
        self._files = files
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
        elif not (self._files.readable and self._files.writable):
            self._task = loop.create_task(self._probe())

    async def _scan(self) -> None:
        try:
            listing = await self._threads.finish(None, _scan, self._files)
        except (TierUnavailable, OSError, ValueError) as error:
            self._scan_at = self._clock() + SCAN_AGAIN_S
            logger.warning("%s can't be listed, which is tried again: %s", self._stock.tier, error)
            return
        self._scan_at = None if self._rescan_s is None else self._clock() + self._rescan_s
        with listing:
            while pack := _next_pack(listing):
                self._stock.take_in(_decoder.decode(pack))
                # So that the loop goes on with other things.
                await asyncio.sleep(0)

    async def _probe(self) -> None:
        try:
            await self._threads.finish(None, self._files.probe)
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


def _scan(files: FileTier) -> BinaryIO:
    """Parts in packs of `PACKED`, each behind its length, in memory that is given back as a whole.

    A million parts are 250 MB of small objects. What stays of them would be spread among these, and keep all of
    that memory; so they are gone before the first is taken in.
    """
    found = files.scan()
    found.reverse()
    listing = os.fdopen(os.memfd_create("listing", os.MFD_CLOEXEC), "w+b")
    while found:
        pack = msgspec.msgpack.encode(found[: -PACKED - 1 : -1])
        del found[-PACKED:]
        listing.write(len(pack).to_bytes(4, "little") + pack)
    listing.seek(0)
    return listing


def _next_pack(listing: BinaryIO) -> bytes:
    return listing.read(int.from_bytes(listing.read(4), "little"))
