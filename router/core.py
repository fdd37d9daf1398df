"""One router's mind: what it knows of the replicas, and the decisions that it takes from it.

Every adapter (HTTP, Serve handles) asks here, so that all of them choose alike.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args

from msgspec.structs import astuple

from cache_store.events import ChunkKey, Tier
from cache_store.keys import chunk_keys, namespace
from cache_store.wire import Source
from router.admission import WaitingRoom
from router.cache_directory import CacheDirectory
from router.config import RouterConfig
from router.decision_log import DecisionLog, Measured
from router.directory import Directory, ReplicaEntry
from router.index import Match, PrefixIndex
from router.ledger import Ledger, Reservation
from router.loadable import Loadable
from router.metrics import RouterMetrics
from router.plan import loadable, make_plan
from router.policy import Policy, ReplicaView, RouteRequest, policy_from
from router.recent import RecentPrefixes
from router.render import Rendered
from workers.messages import Plan, ReplicaInfo

_LOG_CAPACITY = 1024
_NO_KEYS: list[list[ChunkKey]] = []


@dataclass
class Query:
    """A request that needs a replica. Keys are computed once per engine identity, and kept for retries."""

    request_id: str
    model: str
    rendered: Rendered
    salt: str
    body_bytes: int
    tenant: str = ""
    tried: set[str] = field(default_factory=set)
    """Replicas that failed this request; not asked again."""
    only: str = ""
    """The one replica that can serve this request, because it holds what the request continues; empty for any."""
    new_work: bool = True
    """False for what asks after work that a replica has already; then one that drains may serve it."""
    keys: dict[tuple[bytes, int, str], list[list[ChunkKey]]] = field(default_factory=dict)

    @property
    def prompt_tokens(self) -> int:
        """Exact where the prompt was tokenised; else a guess from the body's size, which load terms can work with."""
        if self.rendered.prompts is None:
            return self.body_bytes // 4
        return sum(len(prompt) for prompt in self.rendered.prompts)

    def chunk_keys(self, identity: bytes, chunk_tokens: int, adapter: str) -> list[list[ChunkKey]]:
        """Per prompt, the keys of its shareable prefix for engines of this identity."""
        kind = (identity, chunk_tokens, adapter)
        found = self.keys.get(kind)
        if found is None:
            digest = namespace(identity, adapter, self.salt)
            prompts: Sequence[array[int]] = self.rendered.prompts or ()
            found = [
                chunk_keys(digest, prompt[:shareable] if shareable < len(prompt) else prompt, chunk_tokens)
                for prompt, shareable in zip(prompts, self.rendered.shareable, strict=True)
            ]
            self.keys[kind] = found
        return found


@dataclass(frozen=True)
class Placed:
    """A decision that holds a place at a replica until its reservation is released."""

    replica: ReplicaInfo
    reservation: Reservation
    matched_tokens: int
    number: int
    """In the decision log."""
    plan: Plan | None = None
    """Where the cluster has KV of the prompt; None where nothing is shared."""
    keys: Sequence[Sequence[ChunkKey]] = ()
    """Per prompt, the chunks of its shareable prefix."""


class RouterCore:
    """Index, directory, ledger, policy and queue of one router. Lives on one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        secret: str,
        known_paths: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index = PrefixIndex()
        self.ledger = Ledger()
        self.recent = RecentPrefixes(clock)
        self.metrics = RouterMetrics(known_paths)
        self.log = DecisionLog(_LOG_CAPACITY, time.time)
        self.room = WaitingRoom(config.limits.max_queue, clock)
        self.directory = Directory(
            self.index, self.ledger, secret, config.heartbeat_timeout_s, self.room.wake, clock
        )
        self.caches = CacheDirectory(self.index, secret, lambda: 2 * self.config.heartbeat_timeout_s)
        self._policy: Policy
        self._pools: dict[str, tuple[ReplicaInfo, ...]] = {}
        self.configure(config)
        self.metrics.watch_queue(lambda: len(self.room))
        for tier in get_args(Tier):
            self.metrics.watch_index(tier, partial(self._indexed_chunks, tier))

    def configure(self, config: RouterConfig) -> None:
        """Take over limits and weights, live."""
        self.config = config
        self._policy = policy_from(config.policy)
        self.room.max_waiting = config.limits.max_queue
        self.directory.set_heartbeat_timeout(config.heartbeat_timeout_s)
        self.room.wake()

    def set_pool(self, pool: str, replicas: Sequence[ReplicaInfo]) -> None:
        """Take over which replicas Serve runs in one pool."""
        self._pools[pool] = tuple(replicas)
        self.directory.update([info for infos in self._pools.values() for info in infos])

    def place(self, query: Query) -> Placed | None:
        """Decide, and reserve in the same step. None when no replica that was not tried has room."""
        entries = {entry.info.id: entry for entry in self._candidates(query)}
        matches: dict[int, list[tuple[Match, Mapping[str, int]]]] = {}
        views = [self._view(entry, query, matches) for entry in entries.values()]
        views = [view for view in views if view.open_requests < self.config.limits.max_requests_per_replica]
        request = RouteRequest(query.request_id, query.prompt_tokens, query.rendered.max_tokens)
        choice = self._policy.choose(request, views)
        if choice is None:
            return None
        entry = entries[choice.replica]
        missing = max(0, query.prompt_tokens - choice.matched_tokens)
        reservation = self.ledger.reserve(choice.replica, query.request_id, missing)
        keys = self._keys(entry, query)
        number = self.log.record(request, keys[0] if keys else [], views, choice)
        self.metrics.decided(query.prompt_tokens, choice.matched_tokens)
        plan = (
            self._plan(entry, query, [match for match, _ in matches[id(keys)]]) if len(self.caches) else None
        )
        return Placed(entry.info, reservation, choice.matched_tokens, number, plan, keys)

    def _plan(self, entry: ReplicaEntry, query: Query, found: list[Match]) -> Plan:
        """What the replica is told, and its node's cache begins to fetch. A request of several prompts has no plan
        for each: its engine asks for itself."""
        holder = self.caches.holder(entry.info.node)
        if len(found) != 1 or not holder:
            return Plan(tenant=query.tenant)
        start = found[0].leading(entry.info.id)
        ahead = loadable(found[0], start, holder)
        plan = make_plan(found[0], start, ahead, holder, self.caches.nodes(), query.tenant)
        if ahead.total > ahead.dram:
            keys = self._keys(entry, query)[0][start : start + ahead.total]
            sources = [
                Source(node, first - start, count) for node, first, count in map(astuple, plan.sources)
            ]
            self.caches.prefetch(entry.info.node, keys, sources, entry.info.ranks)
        return plan

    def computed(self, placed: Placed) -> None:
        """The replica has computed the prompts of the request, and has their KV."""
        placed.reservation.first_token()
        for keys in placed.keys:
            self.recent.add(placed.replica.id, keys)

    def release(self, placed: Placed, measured: Measured) -> None:
        """The request has ended; whoever waits for a place may have this one."""
        placed.reservation.release()
        self.log.measure(placed.number, measured)
        self.room.wake()

    def has_candidates(self, query: Query) -> bool:
        """Whether any live replica could serve the request, with room or without."""
        return any(True for _ in self._candidates(query))

    def _candidates(self, query: Query) -> Iterator[ReplicaEntry]:
        entries = self.directory.ready() if query.new_work else self.directory.reachable()
        return (entry for entry in entries if self._may_serve(entry, query))

    def _may_serve(self, entry: ReplicaEntry, query: Query) -> bool:
        replica = entry.info.id
        return (
            replica not in query.tried
            and query.only in ("", replica)
            and (not query.model or query.model in entry.info.models)
        )

    def _keys(self, entry: ReplicaEntry, query: Query) -> list[list[ChunkKey]]:
        hello = entry.hello
        if hello is None or query.rendered.prompts is None:
            return _NO_KEYS
        adapter = entry.info.adapters.get(query.model, "")
        return query.chunk_keys(hello.identity, hello.chunk_tokens, adapter)

    def _view(
        self,
        entry: ReplicaEntry,
        query: Query,
        matches: dict[int, list[tuple[Match, Mapping[str, int]]]],
    ) -> ReplicaView:
        """`matches`: look-ups of this decision, so that replicas of one identity share them: what the index knows of
        each prompt, and how much of it replicas have computed just now."""
        replica = entry.info.id
        keys = self._keys(entry, query)
        found = matches.get(id(keys))
        if found is None:
            found = matches[id(keys)] = [
                (self.index.match(prompt), self.recent.leading(prompt)) for prompt in keys
            ]
        chunks = sum(max(match.leading(replica), recent.get(replica, 0)) for match, recent in found)
        matched = chunks * entry.hello.chunk_tokens if entry.hello is not None else 0
        own = self.ledger.load(replica)
        view = ReplicaView.combine(replica, entry.info.role, matched, own, entry.load, entry.own_at_load)
        holder = self.caches.holder(entry.info.node)
        if holder and entry.hello is not None and len(found) == 1:
            ahead = loadable(found[0][0], chunks, holder)
            if ahead.total:
                tokens = Loadable(*(chunks * entry.hello.chunk_tokens for chunks in ahead))
                view = replace(view, loadable=tokens)
        return view

    def _indexed_chunks(self, tier: Tier) -> int:
        stats = self.index.stats().get(tier)
        return stats.entries if stats is not None else 0

    async def close(self) -> None:
        await self.directory.close()
        await self.caches.close()
