"""Replicas that may answer one request, as columns: a decision among hundreds of them may not loop over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.loadable import NOTHING_LOADABLE, Loadable
from router.speed import PRIOR, TIERS, Speed

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Candidate(msgspec.Struct, frozen=True, omit_defaults=True):
    """One row of `Candidates`, for people, logs and tests."""

    id: str
    matched: int = 0
    """Leading prompt tokens whose KV is in the replica's own blocks (hbm)."""
    loadable: Loadable = NOTHING_LOADABLE
    """Prompt tokens behind the matched ones that its node can load, by where their KV is."""
    pending: int = 0
    """Prompt tokens still to be computed there for requests decided earlier, by any router."""
    waiting: int = 0
    """Requests without a first token."""
    running: int = 0
    """Streams that decode."""
    kv_used: float = 0.0
    """Part of the KV blocks in use, 0 to 1."""
    prefill_role: bool = False
    draining: bool = False
    last_chosen: int = 0
    """Number of this router's latest decision for the replica; 0 for never."""
    speed: dict[str, Any] = msgspec.field(default_factory=PRIOR.named)
    """See `router.speed.Speed.named`."""
    waited_s: float = 0.0
    """Since `pending` was counted; the replica went on computing."""

    @property
    def open_requests(self) -> int:
        return self.waiting + self.running


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Columns of equal length n, ordered alike. Read only: several of them may share arrays."""

    ids: Sequence[str]
    matched: Ints
    """(n,) leading prompt tokens in the replica's own blocks."""
    loadable: Ints
    """(n, 4) tokens behind them that its node can load, by tier as in `Loadable`."""
    pending: Ints
    """(n,) prompt tokens to compute for requests decided earlier, by any router."""
    waiting: Ints
    """(n,) requests without a first token."""
    running: Ints
    """(n,) streams that decode."""
    kv_used: Floats
    """(n,) part of the KV blocks in use."""
    prefill_role: Flags
    """(n,) of the prefill pool."""
    draining: Flags
    last_chosen: Ints
    """(n,) number of this router's latest decision for it; 0 for never."""
    speed: Speed
    """Columns."""
    waited_s: Floats | None = None
    """(n,) seconds since `pending` was counted, in which the replicas went on computing; None for none."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def open_requests(self) -> Ints:
        return self.waiting + self.running

    @classmethod
    def of(cls, rows: Sequence[Candidate]) -> Self:
        """Inverse of `rows`."""

        def ints(name: str) -> Ints:
            return np.array([getattr(row, name) for row in rows], dtype=np.int64)

        return cls(
            ids=[row.id for row in rows],
            matched=ints("matched"),
            loadable=np.array([row.loadable for row in rows], dtype=np.int64).reshape(-1, TIERS),
            pending=ints("pending"),
            waiting=ints("waiting"),
            running=ints("running"),
            kv_used=np.array([row.kv_used for row in rows], dtype=np.float64),
            prefill_role=np.array([row.prefill_role for row in rows], dtype=np.bool_),
            draining=np.array([row.draining for row in rows], dtype=np.bool_),
            last_chosen=ints("last_chosen"),
            speed=Speed.stack(Speed.from_named(row.speed) for row in rows),
            waited_s=np.array([row.waited_s for row in rows], dtype=np.float64),
        )

    def row(self, index: int) -> Candidate:
        return Candidate(
            id=self.ids[index],
            matched=int(self.matched[index]),
            loadable=Loadable(*self.loadable[index].tolist()),
            pending=int(self.pending[index]),
            waiting=int(self.waiting[index]),
            running=int(self.running[index]),
            kv_used=float(self.kv_used[index]),
            prefill_role=bool(self.prefill_role[index]),
            draining=bool(self.draining[index]),
            last_chosen=int(self.last_chosen[index]),
            speed=self.speed.row(index).named(),
            waited_s=float(self.waited_s[index]) if self.waited_s is not None else 0.0,
        )

    def rows(self) -> list[Candidate]:
        return [self.row(index) for index in range(len(self))]

    def take(self, rows: NDArray[Any]) -> Candidates:
        """Some of them, by numbers or by mask."""
        numbers = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return Candidates(
            [self.ids[number] for number in numbers],
            self.matched[numbers],
            self.loadable[numbers],
            self.pending[numbers],
            self.waiting[numbers],
            self.running[numbers],
            self.kv_used[numbers],
            self.prefill_role[numbers],
            self.draining[numbers],
            self.last_chosen[numbers],
            self.speed.take(numbers),
            self.waited_s[numbers] if self.waited_s is not None else None,
        )

    def usable(self) -> Ints:
        """Rows that may answer. Roles are soft: a prefill replica answers when no other replica is left."""
        free = ~self.draining
        preferred = free & ~self.prefill_role
        return np.flatnonzero(preferred if preferred.any() else free)
