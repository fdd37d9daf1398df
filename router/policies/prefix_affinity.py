"""The default: tokens to compute here, those pending before them, and some for each open request.

What an overlap-plus-load rule does. Loading counts as a part of computing, the same on every replica. The load terms
keep a prefix that everyone shares from pulling everyone to the replica that had it first.

Fails when replicas differ in speed, or change it; when attention makes the last tokens of a long prompt much dearer
than the first; when a tier is so slow that computing would be faster; and when the weight of a request does not fit the
traffic: it stands for what its decode costs, which tokens of a prompt do not measure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.candidates import Candidates
from router.choice import Choice, RouteRequest
from router.policies.picking import choice_of

LOADING = np.array((0.05, 0.1, 0.15, 0.3))
"""What loading a token costs, as a part of computing it: from dram, a peer, disk, remote."""


@dataclass(frozen=True, slots=True)
class PrefixAffinityPolicy:
    request_tokens: float = 512.0
    """Prompt tokens that one open request counts as: it slows a prefill, and is slowed by one."""

    def choose(self, request: RouteRequest, candidates: Candidates) -> Choice | None:
        usable = candidates.usable()
        if not len(usable):
            return None
        prompt = max(1, request.prompt_tokens)
        matched = np.minimum(candidates.matched[usable], prompt - 1)
        upto = np.minimum(np.cumsum(candidates.loadable[usable], axis=1), (prompt - 1 - matched)[:, None])
        missing = prompt - matched - upto[:, -1]
        loading = np.diff(upto, axis=1, prepend=0) @ LOADING
        load = candidates.pending[usable] + self.request_tokens * candidates.open_requests[usable]
        return choice_of(request, candidates, usable, missing + loading + load)
