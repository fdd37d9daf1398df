"""The candidate with the fewest prompt tokens to compute, open requests counted as some tokens each.

Fails when prompts share prefixes, as round robin does, and less so: who has a prefix is not asked, but a replica that
happens to have it is sooner idle again. Replicas of different speed count as equally fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.candidates import Candidates
from router.choice import Choice, RouteRequest
from router.policies.picking import choice_of


@dataclass(frozen=True, slots=True)
class LeastLoadedPolicy:
    request_tokens: float = 512.0
    """Prompt tokens that one open request counts as."""

    def choose(self, request: RouteRequest, candidates: Candidates) -> Choice | None:
        usable = candidates.usable()
        if not len(usable):
            return None
        cost = candidates.pending[usable] + self.request_tokens * candidates.open_requests[usable]
        return choice_of(request, candidates, usable, cost)
