"""What a router knows of its replicas, as columns that are kept current between decisions.

A decision among hundreds of replicas reads arrays. Only the rows of replicas that something was decided or heard of
since the last one are written anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from cache_store.events import Hello, Load
from router.calibration import Observation
from router.candidates import Candidates, Flags, Ints
from router.known_speeds import KnownSpeeds
from router.ledger import Ledger
from router.others_load import OthersLoad
from router.speed import Floats, Speed
from workers.messages import ReplicaInfo

Kind = tuple[bytes, int, str]
"""Engines that share KV for a model: identity, chunk tokens, adapter."""

_PENDING, _WAITING, _RUNNING, _LAST_CHOSEN = range(4)
_KV_USED, _STAMP = range(2)
_PREFILL_ROLE, _DRAINING = range(2)


class Known(Protocol):
    """A replica, and what it said last. `load` is another object after each report."""

    @property
    def info(self) -> ReplicaInfo: ...

    @property
    def hello(self) -> Hello | None: ...

    @property
    def load(self) -> Load | None: ...

    @property
    def others(self) -> OthersLoad: ...


Entry = TypeVar("Entry", bound=Known)


@dataclass(frozen=True, slots=True)
class Pool(Generic[Entry]):
    """Replicas that may be asked for one model, as of some moment; columns, ordered alike."""

    entries: Sequence[Entry]
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


def kind_of(entry: Known, model: str) -> Kind | None:
    """None for a replica that has not said what it is."""
    hello = entry.hello
    if hello is None:
        return None
    return hello.identity, hello.chunk_tokens, entry.info.adapters.get(model, "")


def _speed_kind(entry: Known) -> tuple[bytes, str]:
    """Replicas of which the same speed is expected: one model and build of an engine, in one pool."""
    return entry.hello.identity if entry.hello is not None else b"", entry.info.role


class Fleet(Generic[Entry]):
    """Rows by replica id. Lives on a router's event loop."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._clock = clock
        self._row_of: dict[str, int] = {}
        self._entries: dict[str, Entry] = {}
        self._speeds = KnownSpeeds(clock)
        self._loads: dict[str, Load] = {}
        """Replica -> the load report that its row has."""
        self._free: list[int] = []
        self._counts: Ints = np.zeros((4, 0), dtype=np.int64)
        self._figures: Floats = np.zeros((2, 0))
        self._flags = np.zeros((2, 0), dtype=np.bool_)
        self._stale: set[str] = set()

    def update(self, entries: Iterable[Entry]) -> None:
        """Take over which replicas there are. What was learned of one that stays is kept."""
        named = {entry.info.id: entry for entry in entries}
        for replica in [known for known, entry in self._entries.items() if named.get(known) is not entry]:
            row = self._row_of.pop(replica)
            self._free.append(row)
            self._speeds.drop(row)
            del self._entries[replica]
            self._loads.pop(replica, None)
        for replica, entry in named.items():
            if replica not in self._entries:
                self._add(replica, entry)

    def pool(self, entries: Sequence[Entry], model: str) -> Pool[Entry]:
        """Columns of some replicas that `update` has named."""
        ids = [entry.info.id for entry in entries]
        number: dict[str, int] = {}
        node_of = [number.setdefault(entry.info.node, len(number)) for entry in entries]
        kinds = frozenset(kind for entry in entries if (kind := kind_of(entry, model)) is not None)
        rows = np.array([self._row_of[replica] for replica in ids], dtype=np.int64)
        position = {replica: at for at, replica in enumerate(ids)}
        return Pool(entries, ids, position, rows, kinds, list(number), np.array(node_of, dtype=np.int64))

    def candidates(self, pool: Pool[Entry], matched: Ints, loadable: Ints) -> Candidates:
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
            speed=Speed(self._speeds.table[:, rows]),
            # An engine does not stand still between two reports.
            waited_s=np.maximum(now - figures[_STAMP], 0.0),
        )

    def observe(self, replica: str, seen: Observation) -> None:
        """A prefill is over; of a replica that has left nothing is learned."""
        row = self._row_of.get(replica)
        if row is not None:
            self._speeds.observe(row, seen)

    def _add(self, replica: str, entry: Entry) -> None:
        if not self._free:
            self._grow()
        row = self._row_of[replica] = self._free.pop()
        self._entries[replica] = entry
        self._speeds.put(row, _speed_kind(entry))
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
        self._flags = np.pad(self._flags, more)
        self._speeds.grow(size)

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
        self._note_pending(rows, columns[_PENDING], np.array(fresh))
        self._counts[:, rows] = columns

    def _take_report(self, replica: str, row: int) -> bool:
        """True where the replica has reported anew."""
        entry = self._entries[replica]
        load = entry.load
        if load is None or load is self._loads.get(replica):
            return False
        self._loads[replica] = load
        self._speeds.put(row, _speed_kind(entry))
        self._speeds.reported(row, load)
        self._figures[_KV_USED, row] = load.kv_used
        self._flags[_DRAINING, row] = load.draining
        return True

    def _note_pending(self, rows: Ints, tokens: Ints, fresh: Flags) -> None:
        """When pending tokens were counted: from then on they become fewer.

        A report and a first token say what is left at that moment. A new reservation joins a line that has moved on.
        """
        before, now = self._counts[:, rows], self._clock()
        queue_s = Speed(self._speeds.table[:, rows]).queue_s(before[_PENDING], before[_WAITING])
        over = now - self._figures[_STAMP, rows] >= queue_s
        anew = fresh | (tokens < before[_PENDING]) | over
        self._figures[_STAMP, rows[anew]] = now

    def check_integrity(self) -> None:
        """Raises AssertionError when a row is lost, taken twice or not what the ledger says."""
        rows = [*self._row_of.values(), *self._free]
        assert sorted(rows) == list(range(self._counts.shape[1]))
        assert self._row_of.keys() == self._entries.keys()
        self._speeds.check_integrity()
        self._refresh()
        for replica, row in self._row_of.items():
            own, others = self._ledger.load(replica), self._entries[replica].others
            assert self._counts[_WAITING, row] == own.prefilling + max(0, others.prefilling), replica
            assert self._counts[_RUNNING, row] == own.running + max(0, others.running), replica
