"""Bytes under a cap: those in use, and those promised to writes that are under way."""

from __future__ import annotations

import threading


class ByteBudget:
    """Thread-safe. What is in use and reserved together never goes above `capacity` by a reservation."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._used = 0
        self._reserved = 0

    @property
    def used(self) -> int:
        """Reserved bytes included."""
        with self._lock:
            return self._used + self._reserved

    def has_room(self, size: int) -> bool:
        with self._lock:
            return self._used + self._reserved + size <= self.capacity

    def reserve(self, size: int) -> bool:
        """Whether there was room. To be ended by `settle`."""
        with self._lock:
            if self._used + self._reserved + size > self.capacity:
                return False
            self._reserved += size
            return True

    def reserve_up_to(self, size: int) -> int:
        """As much of `size` as there is room for, perhaps nothing. To be ended by `settle`."""
        with self._lock:
            size = max(0, min(size, self.capacity - self._used - self._reserved))
            self._reserved += size
            return size

    def settle(self, reserved: int, used: int) -> None:
        """End a reservation; `used` bytes more are in use now."""
        with self._lock:
            self._reserved -= reserved
            self._used += used

    def add(self, used: int) -> None:
        """Negative for bytes given back."""
        self.settle(0, used)

    def correct(self, used: int) -> None:
        """Replace what is in use by what was counted, without the reserved bytes."""
        with self._lock:
            self._used = used

    def check_integrity(self) -> None:
        """Raises AssertionError when the books contradict themselves. Call it with no write under way."""
        assert self._reserved == 0
        assert self._used >= 0
