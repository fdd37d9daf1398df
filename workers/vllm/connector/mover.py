"""The thread of a worker that moves chunks: between the engine's blocks and slots, and through the store.

One thread, so that what it does comes one after the other: loads before saves, and a save takes a slot only while
loads keep their half of them. Nothing here makes the engine wait: a save that finds no slot in time is dropped, a load
that fails is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from threading import Event, Thread

from workers.vllm.connector.copying import Blocks, Origin
from workers.vllm.connector.loader import Loader
from workers.vllm.connector.metadata import LoadWork, RequestId, SaveWork
from workers.vllm.connector.progress import Ended, Progress
from workers.vllm.connector.saver import Saver
from workers.vllm.connector.store import SlotStore

logger = logging.getLogger(__name__)

_STARVED_S = 0.02
"""How soon a slot is asked for again where none was free: some come back without a word."""


class Mover:
    """Call order: `start`, then anything from one thread, then `close`."""

    def __init__(
        self,
        blocks: Blocks,
        slots: int,
        store: SlotStore,
        origin: Origin,
        *,
        load_limit_s: float = 10.0,
        hold_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots` is how many the store has for this worker, at least two. `hold_s` is how long the blocks of a
        closing request wait for a slot."""
        if slots < 2:
            raise ValueError(
                f"a staging area of {slots} slots; needed: at least 2, one for loads and one for saves"
            )
        self._clock = clock
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._progress = Progress()
        self._loader = Loader(blocks, store, origin, self._progress, self._jobs.put, load_limit_s)
        self._saver = Saver(blocks, store, origin, self._progress, self._jobs.put, slots // 2, hold_s)
        self._stopped = False
        self._thread = Thread(target=self._run, name="manta-mover", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def load(self, work: Iterable[LoadWork], fence: object = None) -> None:
        """Every load ends: it is named as received once, with the blocks that it could not fill."""
        for each in work:
            self._jobs.put(lambda load=each: self._loader.add(load, fence, self._clock()))  # type: ignore[misc]

    def cancel(self, requests: Iterable[RequestId]) -> None:
        """End these loads soon. Those that have ended already are none."""
        for name in requests:
            self._jobs.put(lambda name=name: self._loader.cancel(name))  # type: ignore[misc]

    def save(self, work: Iterable[SaveWork], fence: object = None) -> None:
        for each in work:
            self._jobs.put(lambda save=each: self._saver.add(save, fence))  # type: ignore[misc]

    def close_requests(self, requests: Iterable[RequestId]) -> None:
        """Each is named as sent when its blocks are no longer read, at the latest `hold_s` and one copy from now."""
        for name in requests:
            self._jobs.put(lambda name=name: self._saver.close(name, self._clock()))  # type: ignore[misc]

    def drop_saves(self, requests: Iterable[RequestId]) -> None:
        """Returns when no save reads blocks of these requests any more; those that have not begun are dropped."""
        names = set(requests)
        self._do(lambda: self._saver.drop(names))

    def take(self) -> Ended:
        return self._progress.take()

    def close(self) -> None:
        """End the thread once its current copy is done. Safe to call twice."""
        self._jobs.put(self._stop)
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def check_integrity(self) -> None:
        """Raises AssertionError when the structures contradict themselves."""
        failures: list[AssertionError] = []

        def check() -> None:
            try:
                self._saver.check_integrity()
            except AssertionError as error:
                failures.append(error)

        self._do(check)
        if failures:
            raise failures[0]

    def _do(self, job: Callable[[], None]) -> None:
        """In the thread, and wait until it is done there. No copy is under way then."""
        done = Event()

        def doing() -> None:
            job()
            done.set()

        self._jobs.put(doing)
        while not done.wait(timeout=1.0):
            if not self._thread.is_alive():
                raise RuntimeError(
                    "the thread that moves KV is dead, and may have left a copy of blocks half done"
                )

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._turn()
            except Exception:
                logger.exception("moving KV failed")

    def _turn(self) -> None:
        """Do what was asked for, then one copy if there is one to do."""
        try:
            job = self._jobs.get(timeout=self._pause())
            while not self._stopped:
                job()
                job = self._jobs.get_nowait()
        except Empty:
            pass
        self._saver.give_up_late(self._clock())
        if self._loader.has_arrivals:
            self._loader.take_arrival()
        else:
            self._saver.gather_next()
        self._loader.go_on(self._clock())

    def _pause(self) -> float | None:
        """How long nothing has to be done unless somebody asks."""
        if self._loader.has_arrivals or self._saver.ready:
            return 0
        now = self._clock()
        deadlines = [*self._loader.deadlines(), *self._saver.deadlines()]
        if self._loader.starved or self._saver.starved:
            deadlines.append(now + _STARVED_S)
        return max(min(deadlines) - now, 0) + 0.001 if deadlines else None

    def _stop(self) -> None:
        self._stopped = True
