"""What a replica keeps for others to fetch, by the names that routers gave it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from workers.handover import FirstHalf, Handover, HandoverError

logger = logging.getLogger(__name__)

_MAX_NAME = 128


@dataclass
class _Entry:
    half: FirstHalf
    until: float = float("inf")
    """When the engine frees the blocks by itself; unbounded while the prompt is being computed."""
    given_up: bool = False


class Handovers:
    """Belongs to one event loop. Call order per name: `begin`, `computed`; `end` at any point.

    The engine frees what nobody fetches or ends after its own time limit; this remembers no longer than that.
    """

    def __init__(
        self, release: Callable[[Handover], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`release` makes the engine free the blocks of a hand-over, where it has not when they were fetched."""
        self._release = release
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._ended = asyncio.Event()

    def __len__(self) -> int:
        """Prompts that are computed or kept for others."""
        self._forget_expired()
        return len(self._entries)

    def begin(self, name: str) -> FirstHalf:
        """Raises HandoverError for a name that can't be one or is in use."""
        if not name or len(name) > _MAX_NAME or not name.isascii() or not name.isprintable():
            raise HandoverError(f"a hand-over can't be named {name[:_MAX_NAME]!r}")
        self._forget_expired()
        if name in self._entries:
            raise HandoverError(f"hand-over {name!r} is there already")
        half = FirstHalf(name)
        self._entries[name] = _Entry(half)
        return half

    async def computed(self, half: FirstHalf) -> None:
        """The request of the first half is over, however. What it kept is released here where it was ended before."""
        entry = self._entries[half.name]
        handover = half.handover
        if handover is not None and not entry.given_up:
            entry.until = self._clock() + handover.hold_s
            return
        self._drop(half.name)
        if handover is not None:
            await self._free(handover)

    async def end(self, name: str) -> bool:
        """Nobody comes any more, since somebody did or nobody will. False for a name that is not known, or not any
        more."""
        self._forget_expired()
        entry = self._entries.get(name)
        if entry is None:
            return False
        if entry.until == float("inf"):
            entry.given_up = True
            return True
        self._drop(name)
        if entry.half.handover is not None:
            await self._free(entry.half.handover)
        return True

    async def empty(self, timeout_s: float) -> bool:
        """Wait until nothing is kept for others; False when the time was up first."""
        end = self._clock() + timeout_s
        while len(self):
            self._ended.clear()
            until = min(end, *(entry.until for entry in self._entries.values()))
            left = until - self._clock()
            if left > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), left)
            if self._clock() >= end:
                return not len(self)
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself."""
        for name, entry in self._entries.items():
            assert entry.half.name == name
            assert not entry.given_up or entry.until == float("inf"), f"{name} was given up and is kept"

    async def _free(self, handover: Handover) -> None:
        try:
            await self._release(handover)
        except Exception:
            logger.warning(
                "the engine could not be told to free hand-over %s; it does by itself in %.0f s",
                handover.name,
                handover.hold_s,
                exc_info=True,
            )

    def _drop(self, name: str) -> None:
        del self._entries[name]
        self._ended.set()

    def _forget_expired(self) -> None:
        now = self._clock()
        for name in [name for name, entry in self._entries.items() if entry.until <= now]:
            self._drop(name)
