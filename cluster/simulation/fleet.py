"""Which replicas there are at a time: those that serve, start, drain or are gone, and for how long each has cost."""

from __future__ import annotations

import math

import numpy as np

from cluster.simulation.config import Autoscaling, SimulationConfig
from router.candidates import Ints


class Fleet:
    """Rows are numbers of replicas; those of the prefill pool come last. Not thread-safe."""

    def __init__(self, config: SimulationConfig) -> None:
        self.size = config.all_replicas
        self._pool = config.prefill_pool.replicas if config.prefill_pool is not None else 0
        self._front = self.size - self._pool
        self._serving = set(range(config.replicas)) | set(range(self._front, self.size))
        self._starting: set[int] = set()
        self.draining: set[int] = set()
        self._since = dict.fromkeys(self._serving, 0.0)
        self._cost_s = 0.0
        self._low_since: float | None = None
        self.most = len(self._serving)
        self._rows: dict[bool, Ints] = {}

    def serves(self, row: int) -> bool:
        """Whether it lives; one that drains does."""
        return row in self._serving or row in self.draining

    def candidates(self, prefill: bool) -> Ints | None:
        """Rows that may get a request, of the prefill pool or of the others; None for all there could be."""
        if len(self._serving) == self.size and not self._pool:
            return None
        if not self._rows:
            rows = np.array(sorted(self._serving), dtype=np.int64)
            self._rows = {True: rows[rows >= self._front], False: rows[rows < self._front]}
        return self._rows[prefill]

    def gone(self, row: int, now: float) -> None:
        self._serving.discard(row)
        self._starting.discard(row)
        self.draining.discard(row)
        self._cost_s += now - self._since.pop(row, now)
        self._rows = {}

    def start(self, row: int, now: float) -> None:
        """It costs from now on, and serves once `started` is called."""
        self._starting.add(row)
        self._since.setdefault(row, now)

    def started(self, row: int, now: float) -> None:
        self._starting.discard(row)
        self._serving.add(row)
        self._since.setdefault(row, now)
        self.most = max(self.most, len(self._serving))
        self._rows = {}

    def drain(self, row: int) -> None:
        self._serving.discard(row)
        self.draining.add(row)
        self._rows = {}

    def missing(self, scaling: Autoscaling, open_requests: int, now: float) -> int:
        """How many replicas to start; below zero, how many to drain."""
        wanted = math.ceil(open_requests / scaling.target_requests)
        wanted = min(max(wanted, scaling.min_replicas), scaling.max_replicas)
        lack = wanted - len(self._serving) - len(self._starting)
        if lack >= 0:
            self._low_since = None
            return lack
        if self._low_since is None:
            self._low_since = now
        if now - self._low_since < scaling.downscale_delay_s:
            return 0
        self._low_since = None
        return max(lack, scaling.min_replicas - len(self._serving))

    def free_rows(self) -> list[int]:
        """That could be started."""
        there = self._serving | self._starting | self.draining
        return [row for row in range(self._front) if row not in there]

    def serving_rows(self) -> list[int]:
        return sorted(self._serving)

    def replica_seconds(self, now: float) -> float:
        """Over all replicas, from the decision to start one until it is gone."""
        return self._cost_s + sum(now - since for since in self._since.values())
