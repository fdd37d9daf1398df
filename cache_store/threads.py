"""Threads in which bytes are moved, so that the store's loop does not wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from cache_store.flights import settled

P = ParamSpec("P")
T = TypeVar("T")


class Threads:
    """A few threads with a queue. A thread can't be stopped: what differs is who waits for it, and how long."""

    def __init__(self, name: str, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._busy = 0
        """Jobs of `finish` that were handed over and of whose end the loop has not heard."""
        self._worked = False
        """The loop has done a job itself in this turn."""

    async def finish(
        self, limit_s: float | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `work` to its end, once it has begun, whatever happens: for work on memory that is somebody else's.

        Raises TimeoutError when it has not begun within `limit_s`; it will not then. When the caller is cancelled,
        work that has begun ends first.
        """
        job = self._pool.submit(work, *args, **kwargs)
        end = asyncio.wrap_future(job)
        self._busy += 1
        end.add_done_callback(self._heard)
        try:
            await asyncio.wait([end], timeout=limit_s)
            if not end.done() and job.cancel():
                raise TimeoutError
        except asyncio.CancelledError:
            if not job.cancel():
                await settled(end)
            raise
        await settled(end)
        try:
            return end.result()
        finally:
            # An exception holds this frame, and with it what the work held: no cycle may keep that.
            del end, job

    async def finish_short(
        self, limit_s: float | None, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """As `finish`, for work that takes about as long as handing it over and hearing of its end.

        Where nothing else is to be done the loop does it itself. What comes beside it goes to the threads: they do it
        side by side, and the loop is held by one piece of work in a turn at most.
        """
        if self._busy or self._worked:
            return await self.finish(limit_s, work, *args, **kwargs)
        self._worked = True
        asyncio.get_running_loop().call_soon(self._turn_over)
        return work(*args, **kwargs)

    def _turn_over(self) -> None:
        self._worked = False

    def _heard(self, end: object) -> None:
        self._busy -= 1

    async def attempt(self, limit_s: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Wait `limit_s` for `work`, which must use nothing that others use. Raises TimeoutError: it then may run
        on, and nobody hears of it."""
        job = self._pool.submit(work, *args, **kwargs)
        return await asyncio.wait_for(asyncio.wrap_future(job), limit_s)

    def close(self) -> None:
        """Begin nothing more. Does not wait for what hangs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
