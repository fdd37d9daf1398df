"""The candidate chosen longest ago, whatever it holds: what cache-blind load balancing does.

Fails when prompts share prefixes, which every replica then computes and keeps for itself; and when requests differ in
length, since a replica that got a long prompt gets its next request all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.candidates import Candidates
from router.choice import Choice, RouteRequest
from router.policies.picking import choice_of


@dataclass(frozen=True, slots=True)
class RoundRobinPolicy:
    def choose(self, request: RouteRequest, candidates: Candidates) -> Choice | None:
        usable = candidates.usable()
        if not len(usable):
            return None
        cost = candidates.last_chosen[usable].astype(np.float64)
        return choice_of(request, candidates, usable, cost)
