"""How evenly the work was shared out: what the busiest replica got of every minute, against the mean."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WINDOW_S = 60
_MOST_CELLS = 20_000_000


class Balance(NamedTuple):
    """Busiest over mean of a sliding minute; 1 is even. NaN where no minute had any work."""

    p50: float
    p99: float
    curve: list[tuple[float, float]]
    """(second, ratio), for a plot."""


def balance(
    at_s: NDArray[np.float64], replica: NDArray[np.int64], work: NDArray[np.float64], replicas: int
) -> Balance:
    """`work`, in any unit, that was given to a replica at a time. The minutes begin a second apart."""
    if not len(at_s):
        return Balance(np.nan, np.nan, [])
    # Where there are very many seconds and replicas, the minutes begin further apart.
    step = max(1.0, (at_s.max() + 1) * replicas / _MOST_CELLS)
    width = max(1, round(WINDOW_S / step))
    bins = (at_s / step).astype(np.int64)
    count = int(bins.max()) + 1
    cells = np.bincount(bins * replicas + replica, weights=work, minlength=count * replicas)
    upto = np.zeros((count + 1, replicas))
    np.cumsum(cells.reshape(count, replicas), axis=0, out=upto[1:])
    width = min(width, count)
    minutes = upto[width:] - upto[:-width]
    mean = minutes.mean(axis=1)
    there = mean > 0
    ratios = minutes.max(axis=1)[there] / mean[there]
    if not len(ratios):
        return Balance(np.nan, np.nan, [])
    seconds = np.flatnonzero(there) * step
    some = np.linspace(0, len(ratios) - 1, min(len(ratios), 300)).astype(np.int64)
    curve = [(float(seconds[at]), float(ratios[at])) for at in some]
    return Balance(float(np.percentile(ratios, 50)), float(np.percentile(ratios, 99)), curve)
