"""What a policy is asked, and what it answers: the seam between a router and the rule by which it picks a replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from router.candidates import Candidates


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """What a policy may know of a request."""

    request_id: str
    prompt_tokens: int
    """Over all prompts of the request; a guess where it could not be tokenised."""
    expected_output_tokens: int | None = None
    """What the client allows or the past suggests; None for unknown."""
    session: str = ""
    """Names the conversation; empty for none. See `router.session`."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds that one replica would take for one request, from the decision on."""

    queue_s: float
    """Until the prompts before it are computed."""
    load_s: float
    """To load what is loaded of the prompt; begins with the queue, so that only what outlasts that is waited for."""
    prefill_s: float
    """To compute the rest."""
    others_s: float
    """What the choice costs others, weighed; no part of `ttft_s`."""
    ttft_s: float
    """From the decision to the first token."""


@dataclass(frozen=True, slots=True)
class Score:
    """A candidate, and what it costs in the policy's own unit. Less is better."""

    replica: str
    cost: float
    predicted: Prediction | None = None
    """None where the policy predicts no seconds."""


@dataclass(frozen=True, slots=True)
class Choice:
    replica: str
    index: int
    """Its row in the candidates."""
    matched_tokens: int
    """Prompt tokens that the replica is expected to find in its own blocks."""
    load_tokens: int = 0
    """Prompt tokens behind them that are expected to be loaded."""
    predicted: Prediction | None = None
    """Of the chosen replica, whatever the policy went by."""
    scores: tuple[Score, ...] = ()
    """The best few candidates, the chosen one first."""


class Policy(Protocol):
    """Pure: keeps no state and draws no random numbers, so that a recorded decision can be taken again, and every
    adapter that shows the same candidates gets the same choice."""

    def choose(self, request: RouteRequest, candidates: Candidates) -> Choice | None:
        """Pick one of `candidates`: replicas that are alive and have room, in any order. None when none may be used.

        The caller reserves the place (`Ledger.reserve`) before it looks at the next request.
        """
