"""A session's requests go where its first one went: rendezvous hashing of its name over the candidates.

What a session is, see `router.session`; without a name the request's own id stands for one, which spreads such requests
evenly. Where a replica comes or goes, only the sessions that move to it or were there change places.

Fails when sessions differ in weight, since nobody looks at load: a replica with a few long conversations stays behind
while others idle; when a session's replica is full, and its requests wander to the next until it has room; and where
many sessions begin alike, each replica computes the common part for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from router.candidates import Candidates, Floats
from router.choice import Choice, RouteRequest
from router.policies.picking import choice_of


@dataclass(frozen=True, slots=True)
class SessionPolicy:
    def choose(self, request: RouteRequest, candidates: Candidates) -> Choice | None:
        usable = candidates.usable()
        if not len(usable):
            return None
        session = request.session or request.request_id
        return choice_of(request, candidates, usable, _ranks(session, [candidates.ids[at] for at in usable]))


def _ranks(session: str, replicas: Sequence[str]) -> Floats:
    """Per replica a number in [0, 1) that depends on the two names only."""
    key = blake2b(session.encode(), digest_size=32).digest()
    digests = b"".join(blake2b(name.encode(), key=key, digest_size=8).digest() for name in replicas)
    return np.frombuffer(digests, dtype="<u8") / 2.0**64
