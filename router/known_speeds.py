"""How fast each replica of a router is: what is learned of its kind, times what it alone deviates by.

Equal machines that were each measured by their own few requests would look unequal; the policy would ask whom it
believes to be fast, and never correct what it believes of the others. So all of a kind teach one `Calibrator`. One
that is slower or faster by more than `SAME_WITHIN`, as after the loss of a core, has a *pace* besides: the median of
measured to expected over its last requests. Where it gets none for `FORGOTTEN_S`, the pace is forgotten, and the
replica is tried again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

import numpy as np

from cache_store.events import Load
from router.calibration import Calibrator, Line, Observation
from router.candidates import Ints
from router.speed import FIELDS, Floats

SAME_WITHIN = 1.25
"""Deviations up to this factor are noise."""
PACE_WINDOW = 12
"""Requests of a replica that its pace is the median of."""
PACE_LEAST = 7
"""Below so many a replica counts as being like the others."""
FORGOTTEN_S = 60.0
_MOST = 100.0
"""Slower than this a replica need not be believed to be."""
_PREFILL = slice(0, 3)


class _Kind:
    """Replicas that are alike."""

    def __init__(self) -> None:
        self.calibrator = Calibrator()
        self.members: set[int] = set()
        self._rows: Ints | None = None

    def change(self, row: int, joins: bool) -> None:
        (self.members.add if joins else self.members.discard)(row)
        self._rows = None

    @property
    def rows(self) -> Ints:
        if self._rows is None:
            self._rows = np.array(sorted(self.members), dtype=np.int64)
        return self._rows


class _Pace:
    """How much longer than others of its kind one replica takes. 1 unless it shows otherwise."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.heard_s = 0.0
        self._changes = 0
        self._lines: deque[Line] = deque(maxlen=PACE_WINDOW)

    def observe(self, line: Line, kind: Calibrator, now: float) -> None:
        self.heard_s = now
        if kind.changes != self._changes:
            # What went before was measured against what is no longer true of anybody.
            self._changes = kind.changes
            self._lines.clear()
        self._lines.append(line)

    def measure(self, prefill: Floats) -> None:
        """`prefill`: seconds per prompt, token and pair that the kind takes."""
        self.factor = 1.0
        if len(self._lines) >= PACE_LEAST:
            ratio = float(np.median([each.seconds / float(each.features @ prefill) for each in self._lines]))
            if not _same(ratio):
                self.factor = min(max(ratio, 1 / _MOST), _MOST)


def _same(ratio: float) -> bool:
    return 1 / SAME_WITHIN <= ratio <= SAME_WITHIN


class KnownSpeeds:
    """Rows are numbers of replicas. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._table: Floats = np.zeros((FIELDS, 0))
        self._kinds: dict[Hashable, _Kind] = {}
        """Kept when their last replica leaves: the next one will be like it."""
        self._kind_of: dict[int, Hashable] = {}
        self._paces: dict[int, _Pace] = {}
        self._odd: set[int] = set()
        """Rows with a pace other than 1."""
        self._stale: set[Hashable] = set()
        """Kinds whose rows are to be written anew."""

    def grow(self, rows: int) -> None:
        """To so many rows."""
        self._table = np.pad(self._table, ((0, 0), (0, rows - self._table.shape[1])))

    def put(self, row: int, kind: Hashable) -> None:
        """A replica is of this kind. What was learned of it stays where it already was."""
        if self._kind_of.get(row) == kind:
            return
        self.drop(row)
        self._kind_of[row] = kind
        self._paces[row] = _Pace()
        self._kinds.setdefault(kind, _Kind()).change(row, joins=True)
        self._stale.add(kind)

    def drop(self, row: int) -> None:
        """The replica has left."""
        if row in self._kind_of:
            self._kinds[self._kind_of.pop(row)].change(row, joins=False)
            del self._paces[row]
            self._odd.discard(row)

    def observe(self, row: int, seen: Observation) -> None:
        """A prefill is over."""
        name = self._kind_of[row]
        kind, pace = self._kinds[name], self._paces[row]
        calibrator, before = kind.calibrator, kind.calibrator.speed
        self._forget()
        odd = pace.factor != 1.0
        line = calibrator.observe(seen.slowed(1 / pace.factor) if odd else seen, row)
        if line is not None and not line.queued and len(kind.members) > 1:
            if odd:
                line = line._replace(seconds=line.seconds * pace.factor)
            pace.observe(line, calibrator, self._clock())
            # A request that was as fast as expected makes nobody odd.
            if odd or not _same(line.seconds / float(line.features @ calibrator.speed.table[_PREFILL])):
                self._measure(row, calibrator)
        if calibrator.speed is not before:
            for other in self._odd & kind.members:
                self._measure(other, calibrator)
            self._stale.add(name)

    def reported(self, row: int, load: Load) -> None:
        """Take over the rates of a replica's load report."""
        name = self._kind_of[row]
        calibrator = self._kinds[name].calibrator
        before = calibrator.speed
        calibrator.reported(load)
        if calibrator.speed is not before:
            self._stale.add(name)

    @property
    def table(self) -> Floats:
        """(FIELDS, rows) as in `Speed`, as of now. Not to be kept: it is written to."""
        if self._odd:
            self._forget()
        for name in self._stale:
            kind = self._kinds[name]
            self._table[:, kind.rows] = kind.calibrator.speed.table[:, None]
            for row in self._odd & kind.members:
                self._table[_PREFILL, row] *= self._paces[row].factor
        self._stale.clear()
        return self._table

    def _measure(self, row: int, calibrator: Calibrator) -> None:
        pace = self._paces[row]
        before = pace.factor
        pace.measure(calibrator.speed.table[_PREFILL])
        if pace.factor != before:
            self._stale.add(self._kind_of[row])
            (self._odd.discard if pace.factor == 1.0 else self._odd.add)(row)

    def _forget(self) -> None:
        now = self._clock()
        for row in [row for row in self._odd if now - self._paces[row].heard_s > FORGOTTEN_S]:
            self._paces[row] = _Pace()
            self._odd.discard(row)
            self._stale.add(self._kind_of[row])

    def check_integrity(self) -> None:
        """Raises AssertionError when a row is of no kind or of two, or has a pace that nobody looks at."""
        assert self._kind_of.keys() == self._paces.keys()
        members = sorted(row for kind in self._kinds.values() for row in kind.members)
        assert members == sorted(self._kind_of)
        assert self._odd == {row for row, pace in self._paces.items() if pace.factor != 1.0}
        assert np.isfinite(self.table).all()
