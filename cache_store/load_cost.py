"""Whether loading KV beats computing it, by measured rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cache_store.wire import ABSENT, TIER_NAMES

SECONDS_PER_BYTE = (0.0, 1 / 5e9, 1 / 1e9, 1 / 1e9, 1 / 200e6)
"""By tier code (`cache_store.wire`), for a tier that was not measured. Optimistic: one load too many measures it, where
a load that never happens would leave it unknown."""

LATENCY_S = (0.0, 0.002, 0.010, 0.010, 0.050)
"""By tier code: what a load takes however short it is, engine and store included. Paid once for all chunks of a tier,
because the later ones are on their way while the first is waited for."""

DECAY = 0.9
FORGET_S = 60.0


class BandwidthMeter:
    """Seconds per byte of each tier, averaged over its last ten loads or so.

    Loads overlap, and share what the tier can do: time in which several ran counts once. A rate that was not
    confirmed for a while is forgotten, so that a tier once slow is tried again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, forget_s: float = FORGET_S) -> None:
        """`clock` counts seconds."""
        self._clock = clock
        self._forget_s = forget_s
        self._tiers = [_Observed() for _ in TIER_NAMES]

    def record(self, tier: int, nbytes: int, seconds: float) -> None:
        """A load of `nbytes` from a tier (its code) that ends now and took so long. Call it as each one ends."""
        seen, now = self._tiers[tier], self._clock()
        if now - seen.last > self._forget_s:
            self._tiers[tier] = seen = _Observed()
        began = max(now - seconds, seen.last)
        seen.nbytes = seen.nbytes * DECAY + nbytes
        seen.busy_s = seen.busy_s * DECAY + max(now - began, 0.0)
        seen.last = now

    def seconds_per_byte(self) -> tuple[float, float, float, float, float]:
        """By tier code; 0 for what was not measured lately."""
        absent, dram, peer, disk, remote = (self._rate(seen) for seen in self._tiers)
        return absent, dram, peer, disk, remote

    def _rate(self, seen: _Observed) -> float:
        if not seen.nbytes or self._clock() - seen.last > self._forget_s:
            return 0.0
        return seen.busy_s / seen.nbytes


class _Observed:
    __slots__ = ("busy_s", "last", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0.0
        self.busy_s = 0.0
        self.last = float("-inf")
        """When the last load ended."""


def chunks_worth_loading(
    tiers: bytes,
    bytes_per_chunk: int,
    chunk_tokens: int,
    seconds_per_byte: Sequence[float],
    prefill_rate: float,
    *,
    local_tokens: int = 0,
    latency_s: Sequence[float] = LATENCY_S,
) -> int:
    """How many leading chunks to load, so that the prompt is ready first; 0 when computing all of it is faster.

    `tiers` has a tier code per chunk, from the first that the engine lacks; `local_tokens` of that one are in the
    engine. `seconds_per_byte` and `latency_s` are by tier code, 0 seconds per byte for never measured.
    `prefill_rate` is tokens per second that the engine computes; 0 for never measured, when all that is there is
    loaded.

    A chunk counts only behind all before it: a slow one may be loaded for the sake of fast ones behind it.
    """
    best = count = 0
    best_s = gained_s = 0.0
    touched = set[int]()
    for tier in tiers:
        if tier == ABSENT or tier >= len(TIER_NAMES):
            break
        count += 1
        if prefill_rate <= 0:
            best = count
            continue
        tokens = chunk_tokens - (local_tokens if count == 1 else 0)
        gained_s += tokens / prefill_rate - bytes_per_chunk * (
            seconds_per_byte[tier] or SECONDS_PER_BYTE[tier]
        )
        if tier not in touched:
            touched.add(tier)
            gained_s -= latency_s[tier]
        if gained_s > best_s:
            best, best_s = count, gained_s
    return best
