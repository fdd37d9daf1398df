"""What a router knows of its replicas, as columns that are kept current between decisions.

A decision among hundreds of replicas reads arrays. Only the rows of replicas that something was decided or heard of
since the last one are written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cache_store.events import Load
from router.calibration import Calibrator
from router.candidates import Candidates, Flags, Ints
from router.directory import ReplicaEntry
from router.ledger import Ledger
from router.speed import FIELDS, Floats, Speed

ENOUGH = 8
"""Prefills from which on a replica is known by its own."""

Kind = tuple[bytes, int, str]
"""Engines that share KV for a model: identity, chunk tokens, adapter."""

_PENDING, _WAITING, _RUNNING, _LAST_CHOSEN = range(4)
_KV_USED, _STAMP = range(2)
_PREFILL_ROLE, _DRAINING = range(2)


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas that may be asked for one model, as of some moment; columns, ordered alike."""

    entries: Sequence[ReplicaEntry]
    ids: Sequence[str]
    position: dict[str, int]
    """Id -> its place in the columns."""
    rows: Ints
    """Rows of the fleet."""
    kinds: frozenset[Kind]
    """Of those whose chunks can be named."""
    nodes: Sequence[str]
    """The nodes that they are on, each once."""
    node_of: Ints
    """Per replica the number of its node."""


def kind_of(entry: ReplicaEntry, model: str) -> Kind | None:
    """None for a replica that has not said what it is."""
    hello = entry.hello
    if hello is None:
        return None
    return hello.identity, hello.chunk_tokens, entry.info.adapters.get(model, "")


class Fleet:
    """Rows by replica id. Lives on a router's event loop."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._row_of: dict[str, int] = {}
        self._entries: dict[str, ReplicaEntry] = {}
        self._calibrators: dict[str, Calibrator] = {}
        self._loads: dict[str, Load] = {}
        """Replica -> the load report that its row has."""
        self._speeds: dict[str, Speed] = {}
        """Replica -> the speed that its row has."""
        self._unsure: set[str] = set()
        """Replicas of which little was seen."""
        self._free: list[int] = []
        self._counts: Ints = np.zeros((4, 0), dtype=np.int64)
        self._figures: Floats = np.zeros((2, 0))
        self._flags = np.zeros((2, 0), dtype=np.bool_)
        self._speed: Floats = np.zeros((FIELDS, 0))
        self._stale: set[str] = set()

    def update(self, entries: Iterable[ReplicaEntry]) -> None:
        """Take over which replicas there are. What was learned of one that stays is kept."""
        named = {entry.info.id: entry for entry in entries}
        for replica in [known for known, entry in self._entries.items() if named.get(known) is not entry]:
            self._free.append(self._row_of.pop(replica))
            del self._entries[replica], self._calibrators[replica]
            self._loads.pop(replica, None)
            self._speeds.pop(replica, None)
            self._unsure.discard(replica)
        for replica, entry in named.items():
            if replica not in self._entries:
                self._add(replica, entry)

    def pool(self, entries: Sequence[ReplicaEntry], model: str) -> Pool:
        """Columns of some replicas that `update` has named."""
        ids = [entry.info.id for entry in entries]
        number: dict[str, int] = {}
        node_of = [number.setdefault(entry.info.node, len(number)) for entry in entries]
        kinds = frozenset(kind for entry in entries if (kind := kind_of(entry, model)) is not None)
        rows = np.array([self._row_of[replica] for replica in ids], dtype=np.int64)
        position = {replica: at for at, replica in enumerate(ids)}
        return Pool(entries, ids, position, rows, kinds, list(number), np.array(node_of, dtype=np.int64))

    def candidates(self, pool: Pool, matched: Ints, loadable: Ints) -> Candidates:
        """As of now. `matched` and `loadable` as in `Candidates`."""
        self._refresh()
        rows, now = pool.rows, self._clock()
        counts, figures, flags = self._counts[:, rows], self._figures[:, rows], self._flags[:, rows]
        return Candidates(
            ids=pool.ids,
            matched=matched,
            loadable=loadable,
            pending=counts[_PENDING],
            waiting=counts[_WAITING],
            running=counts[_RUNNING],
            kv_used=figures[_KV_USED],
            prefill_role=flags[_PREFILL_ROLE],
            draining=flags[_DRAINING],
            last_chosen=counts[_LAST_CHOSEN],
            speed=Speed(self._speed[:, rows]),
            # An engine does not stand still between two reports.
            waited_s=np.maximum(now - figures[_STAMP], 0.0),
        )

    def calibrator(self, replica: str) -> Calibrator | None:
        """None for a replica that has left."""
        self._stale.add(replica)
        return self._calibrators.get(replica)

    def _add(self, replica: str, entry: ReplicaEntry) -> None:
        if not self._free:
            self._grow()
        row = self._row_of[replica] = self._free.pop()
        self._entries[replica] = entry
        self._calibrators[replica] = Calibrator()
        self._counts[:, row] = 0
        self._figures[:, row] = 0.0, self._clock()
        self._flags[:, row] = entry.info.role == "prefill", False
        self._stale.add(replica)

    def _grow(self) -> None:
        old = self._counts.shape[1]
        size = max(8, 2 * old)
        self._free.extend(range(size - 1, old - 1, -1))
        more = ((0, 0), (0, size - old))
        self._counts, self._figures = np.pad(self._counts, more), np.pad(self._figures, more)
        self._flags, self._speed = np.pad(self._flags, more), np.pad(self._speed, more)

    def _refresh(self) -> None:
        changed = self._ledger.changed
        stale = [replica for replica in changed | self._stale if replica in self._row_of]
        changed.clear()
        self._stale.clear()
        if not stale:
            return
        rows = np.array([self._row_of[replica] for replica in stale])
        counts, fresh = [], []
        for replica, row in zip(stale, rows.tolist(), strict=True):
            fresh.append(self._take_report(replica, row))
            own, others = self._ledger.load(replica), self._entries[replica].others
            counts.append(
                (
                    own.prefill_tokens + max(0, others.prefill_tokens),
                    own.prefilling + max(0, others.prefilling),
                    own.running + max(0, others.running),
                    own.last_chosen,
                )
            )
        columns = np.array(counts, dtype=np.int64).T
        if self._unsure:
            self._believe_siblings()
        self._note_pending(rows, columns[_PENDING], np.array(fresh))
        self._counts[:, rows] = columns

    def _take_report(self, replica: str, row: int) -> bool:
        """True where the replica has reported anew."""
        entry, calibrator = self._entries[replica], self._calibrators[replica]
        load = entry.load
        fresh = load is not None and load is not self._loads.get(replica)
        if load is not None and fresh:
            self._loads[replica] = load
            calibrator.reported(load)
            self._figures[_KV_USED, row] = load.kv_used
            self._flags[_DRAINING, row] = load.draining
        if calibrator.speed is not self._speeds.get(replica):
            self._speeds[replica] = calibrator.speed
            self._speed[:, row] = calibrator.speed.table
            if calibrator.observed >= ENOUGH:
                self._unsure.discard(replica)
            else:
                self._unsure.add(replica)
        return fresh

    def _believe_siblings(self) -> None:
        """Of whom little was seen, it is believed that he is like the others: what was not tried must not look slow."""
        seen = [
            self._speeds[replica].table
            for replica, each in self._calibrators.items()
            if each.observed and replica in self._speeds
        ]
        if not seen:
            return
        typical = np.median(seen, axis=0)
        for replica in self._unsure:
            part = self._calibrators[replica].observed / ENOUGH
            own = self._speeds[replica].table
            self._speed[:, self._row_of[replica]] = part * own + (1 - part) * typical

    def _note_pending(self, rows: Ints, tokens: Ints, fresh: Flags) -> None:
        """When pending tokens were counted: from then on they become fewer.

        A report and a first token say what is left at that moment. A new reservation joins a line that has moved on.
        """
        before, now = self._counts[:, rows], self._clock()
        queue_s = Speed(self._speed[:, rows]).queue_s(before[_PENDING], before[_WAITING])
        over = now - self._figures[_STAMP, rows] >= queue_s
        anew = fresh | (tokens < before[_PENDING]) | over
        self._figures[_STAMP, rows[anew]] = now

    def check_integrity(self) -> None:
        """Raises AssertionError when a row is lost, taken twice or not what the ledger says."""
        rows = [*self._row_of.values(), *self._free]
        assert sorted(rows) == list(range(self._counts.shape[1]))
        assert self._row_of.keys() == self._entries.keys() == self._calibrators.keys()
        self._refresh()
        for replica, row in self._row_of.items():
            own, others = self._ledger.load(replica), self._entries[replica].others
            assert self._counts[_WAITING, row] == own.prefilling + max(0, others.prefilling), replica
            assert self._counts[_RUNNING, row] == own.running + max(0, others.running), replica
