"""Calls into libraries that know no time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class TimedCalls:
    """Runs calls on daemon threads and waits for each only so long.

    A call that takes longer is left behind: its result is dropped, and its thread keeps no process from ending. At
    most `most` calls run at once, those left behind among them.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._slots = threading.BoundedSemaphore(most)

    def run(self, call: Callable[[], T], limit_s: float) -> T:
        """What `call` returns or raises. Raises TimeoutError where it has not ended, or not begun, in `limit_s`.

        After that nobody waits for `call`: it must not write to what its caller uses again.
        """
        deadline = time.monotonic() + limit_s
        if not self._slots.acquire(timeout=limit_s):
            raise TimeoutError(f"{self._name}: all calls are busy, for {limit_s:g} s")
        result: Future[T] = Future()
        try:
            threading.Thread(target=self._work, args=(call, result), name=self._name, daemon=True).start()
        except BaseException:
            self._slots.release()
            raise
        try:
            return result.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if result.done():
                raise
            raise TimeoutError(f"{self._name}: no answer within {limit_s:g} s") from None

    def _work(self, call: Callable[[], T], result: Future[T]) -> None:
        try:
            value = call()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value)
        finally:
            self._slots.release()
