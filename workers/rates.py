"""Measured rates, in units per second."""

from __future__ import annotations


class RateMeter:
    """Exponentially weighted rate: old work loses half its weight with every `half_life_s` seconds of new work.

    Weighting amounts and durations apart makes the result a true quotient of sums, so that one tiny sample with a
    silly quotient weighs as little as it should.
    """

    def __init__(self, half_life_s: float = 10.0) -> None:
        self._half_life_s = half_life_s
        self._amount = 0.0
        self._seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        """`amount` was done in `seconds` of work. Ignores what can't be a measurement."""
        if amount <= 0 or seconds <= 0:
            return
        keep = 0.5 ** (seconds / self._half_life_s)
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + seconds

    @property
    def rate(self) -> float:
        """Units per second; 0 when nothing was measured yet."""
        return self._amount / self._seconds if self._seconds else 0.0
