"""Which replica answers a request.

A policy is a pure function of the request and of what is known about the replicas at that moment. It keeps
no state and draws no random numbers, so a recorded decision can be taken again from its log entry, and any
adapter (HTTP, Ray Serve handles) that shows it the same views gets the same choice.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from cache_store.events import Load
from router.config import PolicyConfig
from router.ledger import OwnLoad
from router.loadable import NOTHING_LOADABLE, Loadable
from workers.messages import Role

_NOTHING = OwnLoad()


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a policy may know of a request."""

    request_id: str
    prompt_tokens: int
    """Over all prompts of the request; 0 where it could not be tokenised."""
    expected_output_tokens: int | None = None
    """What the client allows or the past suggests; None for unknown."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as the router sees it at the moment of a decision."""

    id: str
    role: Role = "unified"
    matched_tokens: int = 0
    """Leading prompt tokens whose KV is in the replica's own blocks (hbm)."""
    prefill_tokens: int = 0
    """Prompt tokens that are still to be computed there for requests decided earlier."""
    open_requests: int = 0
    kv_used: float = 0.0
    """Part of the KV blocks in use, 0 to 1."""
    draining: bool = False
    last_chosen: int = 0
    """Number of this router's latest decision for the replica; 0 for never."""
    loadable: Loadable = NOTHING_LOADABLE
    """Prompt tokens behind the matched ones that its node can load, by where their KV is."""

    @classmethod
    def combine(
        cls,
        id: str,
        role: Role,
        matched_tokens: int,
        own: OwnLoad,
        reported: Load | None,
        own_then: OwnLoad = _NOTHING,
    ) -> Self:
        """What the router has open there now, and what the replica's last report said of others.

        `own_then` is what the router had open when that report came: the report counts it too. A report may be
        a fraction of a second old; what this router has decided or seen finished since is in its own count.
        """
        if reported is None:
            return cls(
                id, role, matched_tokens, own.prefill_tokens, own.open_requests, last_chosen=own.last_chosen
            )
        return cls(
            id,
            role,
            matched_tokens,
            own.prefill_tokens + max(0, reported.prefill_tokens - own_then.prefill_tokens),
            own.open_requests + max(0, reported.requests - own_then.open_requests),
            reported.kv_used,
            reported.draining,
            own.last_chosen,
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """What it costs to let one replica answer, in its model's unit. Less is better."""

    total: float
    parts: Mapping[str, float]
    """The total's terms by name, for people."""


@dataclass(frozen=True, slots=True)
class Score:
    """A candidate and its cost."""

    replica: str
    cost: Cost


@dataclass(frozen=True, slots=True)
class Choice:
    replica: str
    matched_tokens: int
    """Prompt tokens that the replica is expected to find in its own blocks."""
    scores: tuple[Score, ...]
    """Every candidate that was compared, in the order of the views."""


class CostModel(Protocol):
    """Predicts what one candidate costs. Pure: equal arguments, equal cost."""

    def cost(self, request: RouteRequest, view: ReplicaView) -> Cost:
        """Costs of one request compare between views; the unit (tokens, seconds) is the model's own."""


class Policy(Protocol):
    def choose(self, request: RouteRequest, views: Sequence[ReplicaView]) -> Choice | None:
        """Pick one of `views`: replicas that are alive and have room. None when none of them may be used.

        Pure: the caller reserves the place (`Ledger.reserve`) before it looks at the next request.
        """


def candidates(views: Sequence[ReplicaView]) -> list[ReplicaView]:
    """Those that may answer. Roles are soft: a prefill replica answers when no other replica is left."""
    usable = [view for view in views if not view.draining]
    return [view for view in usable if view.role != "prefill"] or usable


@dataclass(frozen=True, slots=True)
class PrefixLoadCost:
    """Cost in prompt tokens: those to compute here, those pending before them, and a share per open request.

    The load terms keep a prefix that everyone shares from pulling everyone to the replica that had it
    first: once that replica is busier by more than the prefix is worth, another one computes it, and then
    both have it.
    """

    load_weight_tokens: float = 512.0
    """Prompt tokens that one open request counts as: it slows a prefill, and it is slowed by one."""
    loading: tuple[float, float, float, float] = (0.05, 0.1, 0.15, 0.3)
    """What loading a token costs, as a part of computing it: from the node's memory, from another node's, from the
    node's disk, from the remote tier."""

    def cost(self, request: RouteRequest, view: ReplicaView) -> Cost:
        loadable = view.loadable.within(request.prompt_tokens - view.matched_tokens)
        # An engine computes at least the last token of a prompt to have something to sample from.
        missing = max(request.prompt_tokens - view.matched_tokens - loadable.total, 1)
        loading = sum(part * tokens for part, tokens in zip(self.loading, loadable, strict=True))
        load = self.load_weight_tokens * view.open_requests
        parts = {"missing": float(missing), "pending": float(view.prefill_tokens), "load": load}
        if loading:
            parts["loading"] = loading
        return Cost(missing + view.prefill_tokens + load + loading, parts)


@dataclass(frozen=True, slots=True)
class PrefixAffinityPolicy:
    """The cheapest candidate; of equals the one with fewest open requests, then the longest unchosen."""

    cost_model: CostModel

    def choose(self, request: RouteRequest, views: Sequence[ReplicaView]) -> Choice | None:
        usable = candidates(views)
        if not usable:
            return None
        costs = [self.cost_model.cost(request, view) for view in usable]
        ranks = [
            (cost.total, view.open_requests, view.last_chosen)
            for cost, view in zip(costs, usable, strict=True)
        ]
        least = min(ranks)
        best = _by_lot(request, [view for rank, view in zip(ranks, usable, strict=True) if rank == least])
        scores = tuple(Score(view.id, cost) for view, cost in zip(usable, costs, strict=True))
        return Choice(best.id, min(best.matched_tokens, request.prompt_tokens), scores)


@dataclass(frozen=True, slots=True)
class RoundRobinPolicy:
    """The candidate chosen longest ago, whatever it holds. What cache-blind load balancing does."""

    def choose(self, request: RouteRequest, views: Sequence[ReplicaView]) -> Choice | None:
        usable = candidates(views)
        if not usable:
            return None
        oldest = min(view.last_chosen for view in usable)
        best = _by_lot(request, [view for view in usable if view.last_chosen == oldest])
        scores = tuple(
            Score(view.id, Cost(float(view.last_chosen), {"last_chosen": float(view.last_chosen)}))
            for view in usable
        )
        return Choice(best.id, min(best.matched_tokens, request.prompt_tokens), scores)


def policy_from(config: PolicyConfig) -> Policy:
    """The policy that the configuration names."""
    if config.kind == "round_robin":
        return RoundRobinPolicy()
    return PrefixAffinityPolicy(PrefixLoadCost(config.load_weight_tokens))


def _by_lot(request: RouteRequest, tied: Sequence[ReplicaView]) -> ReplicaView:
    """One of equals, by a hash of the request: routers that just started must not all pick the same."""
    if len(tied) == 1:
        return tied[0]
    return min(tied, key=lambda view: (zlib.crc32(f"{request.request_id}/{view.id}".encode()), view.id))
