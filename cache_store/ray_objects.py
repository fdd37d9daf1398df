"""Chunk payloads in the Ray object store."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import ray
import ray.exceptions

from cache_store.object_space import ObjectGone

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.25
OWN_OBJECT_S = 5.0
"""Longest wait for an object of this process on this node, which is there at once."""


class RayObjectSpace:
    """Objects that this process puts, and therefore owns: they live as long as it does.

    A zero-copy array of the object is kept beside the ref, so that reading a payload is no call into Ray.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._looked = float("-inf")
        self._leaving: dict[bytes, int] = {}
        """Bytes of objects whose ref was given out, by hexadecimal id, since they were freed here."""

    def put(self, payload: memoryview) -> RayHeld:
        ref = _put(np.frombuffer(payload, np.uint8))
        if ref is None:
            raise MemoryError(f"the Ray object store did not take {payload.nbytes} bytes")
        try:
            return RayHeld(self, ref, ray.get(ref, timeout=OWN_OBJECT_S))
        except ray.exceptions.RayError as error:
            raise MemoryError(f"the Ray object store lost {payload.nbytes} bytes: {error}") from error

    def pull(self, ref: object, timeout_s: float) -> RayHeld:
        if not isinstance(ref, ray.ObjectRef):
            raise ObjectGone(f"a {type(ref).__name__} is no Ray object")
        try:
            array = ray.get(ref, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"not here within {timeout_s} s") from error
        except ray.exceptions.RayError as error:
            raise ObjectGone(str(error)) from error
        if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
            raise ObjectGone("the object is no chunk payload")
        return RayHeld(self, ref, array)

    def lingering(self) -> int:
        """The owner keeps an object in its table of references until the last borrower has dropped it. Looking
        through the table takes milliseconds when it is long: not each time, and too much until the next."""
        with self._lock:
            if not self._leaving:
                return 0
            if self._clock() - self._looked < LOOK_EVERY_S:
                return sum(self._leaving.values())
            self._looked = self._clock()
            known = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
            self._leaving = {name: nbytes for name, nbytes in self._leaving.items() if name in known}
            return sum(self._leaving.values())

    def left(self, name: bytes, nbytes: int) -> None:
        """An object whose ref somebody else may have was freed here."""
        with self._lock:
            self._leaving[name] = nbytes


def _put(array: np.ndarray) -> ray.ObjectRef | None:
    """None when there is no room: an exception would keep the caller's buffer in its traceback."""
    try:
        return ray.put(array)
    except (ray.exceptions.RayError, OSError) as error:
        logger.warning("a payload can't be put: %s", error)
        return None


class RayHeld:
    """See `Held`."""

    def __init__(self, space: RayObjectSpace, ref: ray.ObjectRef, array: np.ndarray) -> None:
        self._space = space
        self._ref: ray.ObjectRef | None = ref
        self._lent = False
        self.nbytes = array.nbytes
        self.view = array.data.toreadonly()
        """Keeps the array, and with it the object's memory, until it is released."""

    @property
    def ref(self) -> object:
        self._lent = True
        return self._ref

    def free(self) -> None:
        if self._ref is None:
            raise ValueError("freed twice")
        self.view.release()
        if self._lent:
            self._space.left(self._ref.hex().encode(), self.nbytes)
        self._ref = None
