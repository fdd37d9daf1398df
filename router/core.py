"""One router's mind: what it knows of the replicas, and the decisions that it takes from it.

Every adapter (HTTP, Serve handles) asks here, so that all of them choose alike.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args

import msgspec
import numpy as np
from msgspec.structs import astuple

from cache_store.events import ChunkKey, Tier
from cache_store.keys import chunk_keys, namespace
from cache_store.wire import Source
from router.admission import WaitingRoom
from router.ahead import Ahead
from router.cache_directory import CacheDirectory
from router.candidates import Candidates
from router.choice import Choice, Policy, RouteRequest
from router.config import RouterConfig
from router.decision_log import DecisionLog, Measured
from router.directory import Directory, ReplicaEntry
from router.disaggregation import InHalves, Verdict, split
from router.fleet import Fleet, Kind, Pool, kind_of
from router.halves import PrefillPlace
from router.holdings import loadable_chunks, matched_chunks
from router.index import Match, PrefixIndex
from router.ledger import Ledger, Reservation
from router.metrics import RouterMetrics
from router.pairing import Pairing
from router.plan import loadable, make_plan
from router.policies import policy_from
from router.recent import RecentPrefixes
from router.render import Rendered
from router.speed import TIERS
from workers.messages import Plan, ReplicaInfo

_LOG_CAPACITY = 1024
_NO_KEYS: list[list[ChunkKey]] = []
_POOL_S = 0.25
"""A replica that falls silent is noticed so much later."""

Found = tuple[Match, Mapping[str, int]]


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
    session: str = ""
    """What the client named; empty for nothing."""
    new_work: bool = True
    """False for what asks after work that a replica has already; then one that drains may serve it."""
    keys: dict[tuple[bytes, int, str], list[list[ChunkKey]]] = field(default_factory=dict)

    @property
    def divisible(self) -> bool:
        """Whether one replica may compute the prompt and another one answer: it is one prompt, of tokens alone."""
        prompts = self.rendered.prompts
        return (
            self.new_work
            and not self.only
            and prompts is not None
            and len(prompts) == 1
            and self.rendered.shareable[0] >= len(prompts[0])
        )

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
    decided_at: float = 0.0
    """By the router's clock."""
    ahead: Ahead | None = None
    prefill: PrefillPlace | None = None
    """Where the prompt is computed; None where `replica` does it."""
    local: str = ""
    """Why `replica` does it, where there is a prefill pool: `router.disaggregation.Verdict`'s reason."""


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
            self.index, self.ledger, self.recent, secret, config.heartbeat_timeout_s, self.room.wake, clock
        )
        self.caches = CacheDirectory(self.index, secret, lambda: 2 * self.config.heartbeat_timeout_s)
        self.fleet = Fleet[ReplicaEntry](self.ledger, clock)
        self._clock = clock
        self._ready_pools: dict[str, Pool[ReplicaEntry]] = {}
        self._pooled = (-1, 0.0)
        self._policy: Policy
        self.pairing = Pairing()
        self.has_prefill_pool = False
        self._pools: dict[str, tuple[ReplicaInfo, ...]] = {}
        self._expected_pools: frozenset[str] = frozenset()
        self.configure(config)
        self.metrics.watch_queue(lambda: len(self.room))
        self.metrics.watch_start(lambda: self.directory.unheard)
        for tier in get_args(Tier):
            self.metrics.watch_index(tier, partial(self._indexed_chunks, tier))

    def configure(self, config: RouterConfig) -> None:
        """Take over limits and weights, live."""
        self.config = config
        self._policy = policy_from(config.policy)
        self.room.max_waiting = config.limits.max_queue
        self.directory.set_heartbeat_timeout(config.heartbeat_timeout_s)
        self._ready_pools.clear()
        self.room.wake()

    def expect_pools(self, pools: Iterable[str]) -> None:
        """Serve will name the replicas of these one by one, and the router waits a moment for all of them."""
        self._expected_pools = frozenset(pools)

    def set_pool(self, pool: str, replicas: Sequence[ReplicaInfo]) -> None:
        """Take over which replicas Serve runs in one pool."""
        self._pools[pool] = tuple(replicas)
        infos = [info for infos in self._pools.values() for info in infos]
        self.pairing.update(infos)
        self.has_prefill_pool = "prefill" in self._expected_pools or any(
            info.role == "prefill" for info in infos
        )
        self.directory.update(infos, complete=self._expected_pools <= self._pools.keys())

    def place(self, query: Query, in_halves: bool = False) -> Placed | None:
        """Decide, and reserve in the same step. None when no replica that was not tried has room. `in_halves`: the
        caller can have the prompt computed elsewhere."""
        pool = self._pool(query)
        if not pool.entries:
            return None
        found = {kind: self._look_up(query, kind) for kind in pool.kinds}
        candidates = self._candidates_in(pool, found)
        first = next((keys[0] for keys in map(query.keys.get, pool.kinds) if keys), ())
        request = RouteRequest(
            query.request_id,
            query.prompt_tokens,
            query.rendered.max_tokens,
            query.session or (first[0].hex() if first else ""),
        )
        choice = self._policy.choose(request, self._answering(candidates))
        if choice is None:
            return None
        verdict = Verdict(None, "")
        if in_halves and self.has_prefill_pool:
            verdict = self._split(query, request, candidates, choice)
        if verdict.halves is not None:
            choice = _second_half(choice, request, candidates, verdict.halves)
        entry = pool.entries[pool.position[choice.replica]]
        missing = max(0, query.prompt_tokens - choice.matched_tokens - choice.load_tokens)
        if verdict.halves is not None:
            missing = 1
        reservation = self.ledger.reserve(choice.replica, query.request_id, missing)
        keys = self._keys(entry, query)
        number = self.log.record(request, keys[0] if keys else [], candidates, choice)
        self.metrics.decided(query.prompt_tokens, choice.matched_tokens)
        plan = prefill = None
        if verdict.halves is not None:
            prefill = self._prefill_place(query, pool, candidates, verdict, found)
            plan = self._plan_of_second_half(query, keys)
        elif len(self.caches):
            plan = self._plan(entry, query, [match for match, _ in self._found(entry, query, found)])
        return Placed(
            entry.info, reservation, choice.matched_tokens, number, plan, keys, self._clock(),
            Ahead.of(candidates, choice) if prefill is None else None,
            prefill, verdict.reason if prefill is None else "",
        )  # fmt: skip

    def _answering(self, candidates: Candidates) -> Candidates:
        """As the policy is to see them: where roles are soft, it does not ask for them."""
        if not self.config.prefill.soft_roles or not candidates.prefill_role.any():
            return candidates
        return replace(candidates, prefill_role=np.zeros_like(candidates.prefill_role))

    def _split(self, query: Query, request: RouteRequest, candidates: Candidates, choice: Choice) -> Verdict:
        if not query.divisible:
            return Verdict(None, "indivisible")
        return split(request, candidates, choice.index, self.pairing.can, self.config.prefill)

    def _prefill_place(
        self,
        query: Query,
        pool: Pool[ReplicaEntry],
        candidates: Candidates,
        verdict: Verdict,
        found: Mapping[Kind, list[Found]],
    ) -> PrefillPlace:
        assert verdict.halves is not None
        row = verdict.halves.prefill
        entry = pool.entries[pool.position[candidates.ids[row]]]
        missing = max(1, query.prompt_tokens - int(candidates.matched[row]))
        plan = None
        if len(self.caches):
            plan = self._plan(entry, query, [match for match, _ in self._found(entry, query, found)])
            if not self.config.prefill.save:
                plan = msgspec.structs.replace(plan, skip_save=query.prompt_tokens)
        reservation = self.ledger.reserve(entry.info.id, query.request_id, missing)
        return PrefillPlace(entry.info, reservation, verdict.halves, verdict.reason, plan)

    def _plan_of_second_half(self, query: Query, keys: Sequence[Sequence[ChunkKey]]) -> Plan | None:
        """It loads nothing from the store: the one that computes does, and all of the prompt comes from there."""
        if not len(self.caches):
            return None
        saved = len(keys[0]) if keys and self.config.prefill.save else 0
        return Plan(tenant=query.tenant, skip_save=saved)

    def _pool(self, query: Query) -> Pool[ReplicaEntry]:
        """Replicas that may answer, with room or without."""
        if query.new_work and not query.tried and not query.only:
            return self._ready_pool(query.model)
        self.fleet.update(self.directory)
        return self.fleet.pool(list(self._candidates(query)), query.model)

    def _ready_pool(self, model: str) -> Pool[ReplicaEntry]:
        """Kept for a while: who is ready changes rarely, and is asked for with every request."""
        now = self._clock()
        if self._pooled != (self.directory.version, now // _POOL_S):
            self._pooled = self.directory.version, now // _POOL_S
            self._ready_pools.clear()
        pool = self._ready_pools.get(model)
        if pool is None:
            self.fleet.update(self.directory)
            entries = [entry for entry in self.directory.ready() if not model or model in entry.info.models]
            pool = self._ready_pools[model] = self.fleet.pool(entries, model)
        return pool

    def _look_up(self, query: Query, kind: Kind) -> list[Found]:
        """Per prompt what the index knows of it, and how much of it replicas have computed just now."""
        if query.rendered.prompts is None:
            return []
        return [(self.index.match(prompt), self.recent.leading(prompt)) for prompt in query.chunk_keys(*kind)]

    def _candidates_in(self, pool: Pool[ReplicaEntry], found: Mapping[Kind, list[Found]]) -> Candidates:
        matched, ahead = np.zeros(len(pool.ids), dtype=np.int64), np.zeros((len(pool.ids), TIERS), np.int64)
        # Keys of one kind of engine are held by no other, so that what is found adds up.
        for (_, chunk_tokens, _), prompts in found.items():
            chunks = matched_chunks(pool, prompts)
            matched += chunks * chunk_tokens
            if len(self.caches) and len(prompts) == 1:
                there = loadable_chunks(pool, prompts[0][0], chunks, self.caches.holder)
                ahead += there * chunk_tokens
        candidates = self.fleet.candidates(pool, matched, ahead)
        with_room = candidates.open_requests < self.config.limits.max_requests_per_replica
        return candidates if with_room.all() else candidates.take(with_room)

    def _found(self, entry: ReplicaEntry, query: Query, found: Mapping[Kind, list[Found]]) -> list[Found]:
        kind = kind_of(entry, query.model)
        return found.get(kind, []) if kind is not None else []

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

    def computed(self, placed: Placed, tokens: Mapping[str, int], streamed: bool) -> float | None:
        """The replica has computed the prompts of the request, and has their KV.

        `tokens` are the prompt's by tier, and those computed; `streamed` where the first token has just come. Returns
        the seconds from the decision to that token.
        """
        placed.reservation.first_token()
        for keys in placed.keys:
            self.recent.add(placed.replica.id, keys)
        if not streamed:
            return None
        seconds = self._clock() - placed.decided_at
        if placed.ahead is not None:
            if placed.ahead.predicted is not None:
                self.metrics.predicted(placed.ahead.predicted.ttft_s, seconds)
            self.fleet.observe(placed.replica.id, placed.ahead.observation(seconds, tokens))
        return seconds

    def prefilled(self, placed: Placed) -> None:
        """The prefill replica has computed the prompt, and has its KV."""
        assert placed.prefill is not None
        for keys in placed.keys:
            self.recent.add(placed.prefill.replica.id, keys)

    def release(self, placed: Placed, measured: Measured) -> None:
        """The request has ended; whoever waits for a place may have this one."""
        placed.reservation.release()
        if placed.prefill is not None:
            placed.prefill.reservation.release()
        self.log.measure(placed.number, measured)
        self.room.wake()

    def has_candidates(self, query: Query) -> bool:
        """Whether any live replica could serve the request, with room or without."""
        return bool(self._pool(query).entries)

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
        kind = kind_of(entry, query.model)
        if kind is None or query.rendered.prompts is None:
            return _NO_KEYS
        return query.chunk_keys(*kind)

    def _indexed_chunks(self, tier: Tier) -> int:
        stats = self.index.stats().get(tier)
        return stats.entries if stats is not None else 0

    async def close(self) -> None:
        await self.directory.close()
        await self.caches.close()


def _second_half(choice: Choice, request: RouteRequest, candidates: Candidates, halves: InHalves) -> Choice:
    row = halves.decode
    matched = min(int(candidates.matched[row]), request.prompt_tokens)
    return replace(
        choice, replica=candidates.ids[row], index=row, matched_tokens=matched, load_tokens=0, predicted=None
    )
