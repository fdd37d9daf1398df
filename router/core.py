"""One router's mind: what it knows of the replicas, and the decisions that it takes from it.

Every adapter (HTTP, Serve handles) asks here, so that all of them choose alike.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from cache_store.events import ChunkKey
from cache_store.keys import chunk_keys, namespace
from router.admission import WaitingRoom
from router.config import RouterConfig
from router.decision_log import DecisionLog, Measured
from router.directory import Directory, ReplicaEntry
from router.index import Match, PrefixIndex
from router.ledger import Ledger, Reservation
from router.metrics import RouterMetrics
from router.policy import Policy, ReplicaView, RouteRequest, policy_from
from router.render import Rendered
from workers.messages import ReplicaInfo

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
    tried: set[str] = field(default_factory=set)
    """Replicas that failed this request; not asked again."""
    only: str = ""
    """The one replica that can serve this request, because it holds what the request continues; empty for any."""
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
        self.metrics = RouterMetrics(known_paths)
        self.log = DecisionLog(_LOG_CAPACITY, time.time)
        self.room = WaitingRoom(config.limits.max_queue, clock)
        self.directory = Directory(
            self.index, self.ledger, secret, config.heartbeat_timeout_s, self.room.wake, clock
        )
        self._policy: Policy
        self._pools: dict[str, tuple[ReplicaInfo, ...]] = {}
        self.configure(config)
        self.metrics.watch_queue(lambda: len(self.room))
        self.metrics.watch_index("hbm", lambda: self._indexed_chunks())

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
        entries = {entry.info.id: entry for entry in self.directory.ready() if self._may_serve(entry, query)}
        matches: dict[int, list[Match]] = {}
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
        return Placed(entry.info, reservation, choice.matched_tokens, number)

    def release(self, placed: Placed, measured: Measured) -> None:
        """The request has ended; whoever waits for a place may have this one."""
        placed.reservation.release()
        self.log.measure(placed.number, measured)
        self.room.wake()

    def has_candidates(self, query: Query) -> bool:
        """Whether any live replica could serve the request, with room or without."""
        return any(self._may_serve(entry, query) for entry in self.directory.ready())

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

    def _view(self, entry: ReplicaEntry, query: Query, matches: dict[int, list[Match]]) -> ReplicaView:
        """`matches`: look-ups of this decision, so that replicas of one identity share them."""
        replica = entry.info.id
        keys = self._keys(entry, query)
        found = matches.get(id(keys))
        if found is None:
            found = matches[id(keys)] = [self.index.match(prompt) for prompt in keys]
        chunks = sum(match.leading(replica) for match in found)
        matched = chunks * entry.hello.chunk_tokens if entry.hello is not None else 0
        own = self.ledger.load(replica)
        return ReplicaView.combine(replica, entry.info.role, matched, own, entry.load, entry.own_at_load)

    def _indexed_chunks(self) -> int:
        stats = self.index.stats().get("hbm")
        return stats.entries if stats is not None else 0

    async def close(self) -> None:
        await self.directory.close()
