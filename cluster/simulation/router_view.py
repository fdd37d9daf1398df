"""The router of the simulation: the router's own index, policy, ledger and calibration, told what happens.

What replicas and stores hold comes to it with a delay, as over their event streams. Columns of what it knows of the
replicas are kept up to date, so that a decision does not go through them one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from cache_store.events import ChunkKey, Load, Tier
from router.ahead import Ahead
from router.calibration import Observation
from router.candidates import Candidates, Ints
from router.choice import Choice, Policy, RouteRequest
from router.index import Match, PrefixIndex
from router.known_speeds import KnownSpeeds
from router.ledger import Ledger, Reservation
from router.plan import loadable
from router.recent import RecentPrefixes
from router.speed import TIERS, Speed

RECENT_NEWS = 4
"""Delays of the news for which the router trusts what it knows itself."""


class Decider(Protocol):
    """A rule that picks a replica and may look at the prompt's chunks; a router's policy does not need to."""

    def decide(
        self, request: RouteRequest, keys: Sequence[ChunkKey], candidates: Candidates
    ) -> Choice | None:
        """As `Policy.choose`. May keep state: it is called once for each decision, in order."""


class ByPolicy(NamedTuple):
    """A policy as it is in the router."""

    policy: Policy

    def decide(
        self, request: RouteRequest, keys: Sequence[ChunkKey], candidates: Candidates
    ) -> Choice | None:
        return self.policy.choose(request, candidates)


class _News(NamedTuple):
    at_s: float
    holder: str
    tier: Tier
    added: Sequence[ChunkKey]
    removed: Sequence[ChunkKey]


class Decided(NamedTuple):
    row: int
    """Of the replica."""
    choice: Choice
    reservation: Reservation
    ahead: Ahead
    """For the calibration."""


class RouterView:
    """Not thread-safe. Rows are numbers of replicas."""

    def __init__(
        self,
        decider: Decider,
        replicas: Sequence[str],
        nodes: Sequence[str],
        prefill: Sequence[bool],
        chunk_tokens: int,
        news_delay_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._decider, self._chunk, self._delay_s, self._clock = decider, chunk_tokens, news_delay_s, clock
        self.replicas = list(replicas)
        self._nodes = list(nodes)
        self._row_of = {name: row for row, name in enumerate(self.replicas)}
        self._rows_of_node: dict[str, list[int]] = {}
        for row, node in enumerate(nodes):
            self._rows_of_node.setdefault(node, []).append(row)
        self.index = PrefixIndex()
        self.ledger = Ledger()
        self.recent = RecentPrefixes(clock, RECENT_NEWS * news_delay_s)
        self._news: deque[_News] = deque()
        n = len(self.replicas)
        self._speeds = KnownSpeeds(clock)
        self._speeds.grow(n)
        for row, computes in enumerate(prefill):
            self._speeds.put(row, computes)
        self._pending, self._waiting, self._running, self._last = np.zeros((4, n), dtype=np.int64)
        self._since = np.zeros(n)
        """When each row's pending tokens were counted: from then on they become fewer."""
        self.kv_used = np.zeros(n)
        self._prefill = np.array(prefill, dtype=np.bool_)
        self.draining = np.zeros(n, dtype=np.bool_)
        self._nothing_loadable = np.zeros((n, TIERS), dtype=np.int64)
        self._in_store = False

    def tell(self, holder: str, tier: Tier, added: Sequence[ChunkKey], removed: Sequence[ChunkKey]) -> None:
        """A holder says what has come and gone; the index knows it after the delay."""
        if added or removed:
            self._news.append(_News(self._clock() + self._delay_s, holder, tier, added, removed))

    def decide(
        self, request: RouteRequest, keys: Sequence[ChunkKey], rows: Ints | None, computes: bool = True
    ) -> Decided | None:
        """Pick one of `rows` (None: all) and reserve it. `computes`: False where the prompt's KV will be brought."""
        self._hear()
        candidates = self._candidates(request, keys, computes)
        if rows is not None:
            candidates = candidates.take(rows)
        choice = self._decider.decide(request, keys, candidates)
        if choice is None:
            return None
        row = self._row_of[choice.replica]
        ahead = Ahead.of(candidates, choice)
        missing = request.prompt_tokens - choice.matched_tokens - choice.load_tokens if computes else 0
        reservation = self.ledger.reserve(choice.replica, request.request_id, max(0, missing))
        self._count(row)
        return Decided(row, choice, reservation, ahead)

    def first_token(self, decided: Decided, keys: Sequence[ChunkKey]) -> None:
        """The prompt is computed, and the router hears of it with the token."""
        decided.reservation.first_token()
        self.recent.add(self.replicas[decided.row], keys)
        self._count(decided.row)

    def observe(self, row: int, seen: Observation) -> None:
        self._speeds.observe(row, seen)

    def report(self, row: int, load: Load) -> None:
        """A load report of a replica."""
        self._speeds.reported(row, load)

    def ended(self, decided: Decided) -> None:
        decided.reservation.release()
        self._count(decided.row)

    def died(self, row: int) -> None:
        """A replica is gone: out of the index at once, with what it had said and was not heard yet."""
        name = self.replicas[row]
        self._news = deque(news for news in self._news if news.holder != name)
        self.index.drop(name)
        self.ledger.forget(name)
        self._speeds.drop(row)
        self._speeds.put(row, bool(self._prefill[row]))
        self.kv_used[row] = 0.0
        self._count(row)

    def _hear(self) -> None:
        now, news = self._clock(), self._news
        while news and news[0].at_s <= now:
            told = news.popleft()
            self._in_store = self._in_store or told.tier != "hbm"
            self.index.apply(told.holder, told.tier, told.added, told.removed)

    def _count(self, row: int) -> None:
        own = self.ledger.load(self.replicas[row])
        # A first token says what is left at that moment; a new reservation joins a line that has moved on.
        before, speed = int(self._pending[row]), Speed(self._speeds.table[:, row])
        over = self._clock() - self._since[row] >= float(speed.queue_s(before, int(self._waiting[row])))
        if own.prefill_tokens < before or over:
            self._since[row] = self._clock()
        self._pending[row], self._waiting[row] = own.prefill_tokens, own.prefilling
        self._running[row], self._last[row] = own.running, own.last_chosen

    def _candidates(self, request: RouteRequest, keys: Sequence[ChunkKey], computes: bool) -> Candidates:
        """Of all replicas. Where nothing is computed, all have all of the prompt."""
        n = len(self.replicas)
        loadable_tokens = self._nothing_loadable
        if computes:
            matched = np.zeros(n, dtype=np.int64)
            found = self.index.match(keys)
            if "hbm" in found.tiers and (leading := found.tiers["hbm"].leading):
                matched[[self._row_of[name] for name in leading]] = list(leading.values())
            for name, chunks in self.recent.leading(keys).items():
                row = self._row_of[name]
                matched[row] = max(int(matched[row]), chunks)
            if self._in_store:
                loadable_tokens = self._loadable(found, matched)
            matched *= self._chunk
        else:
            matched = np.full(n, request.prompt_tokens, dtype=np.int64)
        return Candidates(
            self.replicas,
            matched,
            loadable_tokens,
            self._pending,
            self._waiting,
            self._running,
            self.kv_used,
            self._prefill,
            self.draining,
            self._last,
            Speed(self._speeds.table),
            self._clock() - self._since,
        )

    def _loadable(self, found: Match, matched: Ints) -> Ints:
        """Tokens that each replica's node can load. Nodes that hold nothing themselves all see the same."""
        owners = {
            holder for tier in ("dram", "disk") if tier in found.tiers for holder in found.tiers[tier].held
        }
        if not owners and "remote" not in found.tiers:
            return self._nothing_loadable
        columns = np.zeros((len(matched), TIERS), dtype=np.int64)
        for start in np.unique(matched).tolist():
            columns[matched == start] = loadable(found, start, "any node")
        for node in owners:
            seen: dict[int, Sequence[int]] = {}
            for row in self._rows_of_node[node]:
                start = int(matched[row])
                if start not in seen:
                    seen[start] = loadable(found, start, node)
                columns[row] = seen[start]
        columns *= self._chunk
        return columns
