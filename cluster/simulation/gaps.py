"""Pauses between tokens, counted in a histogram: one entry each would be millions."""

from __future__ import annotations

import math
from collections.abc import Sequence

PER_DECADE = 100
_LOWEST_S = 1e-5
_BINS = 8 * PER_DECADE


class Gaps:
    """Bins of equal width in the logarithm; a percentile is right within 1.2 %."""

    __slots__ = ("_count", "_longest", "_sum", "counts")

    def __init__(self) -> None:
        self.counts = [0.0] * (_BINS + 1)
        self._sum = self._count = self._longest = 0.0

    def add(self, seconds: float, count: float) -> None:
        place = int(math.log10(seconds / _LOWEST_S) * PER_DECADE) if seconds > _LOWEST_S else 0
        self.counts[place if place < _BINS else _BINS] += count
        self._sum += seconds * count
        self._count += count
        if seconds > self._longest:
            self._longest = seconds

    @property
    def mean(self) -> float:
        return self._sum / self._count if self._count else 0.0

    def percentiles(self, parts: Sequence[float]) -> list[float]:
        """`parts` ascending, 0 to 1. Zeros when nothing was counted."""
        found: list[float] = []
        seen, place = 0.0, -1
        for part in parts:
            while place < _BINS and (seen < part * self._count or place < 0):
                place += 1
                seen += self.counts[place]
            middle = _LOWEST_S * 10 ** ((max(place, 0) + 0.5) / PER_DECADE)
            found.append(min(middle, self._longest))
        return found
