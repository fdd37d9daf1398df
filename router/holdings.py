"""What of a prompt each replica of a pool has, and what its node can load: columns, from what the index found.

The index names the few that hold something; everybody else's row is the same, and is not computed for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from router.candidates import Ints
from router.fleet import Entry, Pool
from router.index import Match
from router.plan import loadable
from router.speed import TIERS

_ELSEWHERE = "\0"
"""A holder that has nothing of its own."""


def matched_chunks(pool: Pool[Entry], found: Sequence[tuple[Match, Mapping[str, int]]]) -> Ints:
    """(n,) leading chunks over all prompts. Per prompt: what the index knows, and who has just computed how much."""
    chunks = np.zeros(len(pool.ids), dtype=np.int64)
    position = pool.position
    for match, recent in found:
        hbm = match.tiers.get("hbm")
        leading = hbm.leading if hbm is not None else {}
        if recent:
            leading = {name: max(leading.get(name, 0), recent.get(name, 0)) for name in {**leading, **recent}}
        here = [(position[name], count) for name, count in leading.items() if name in position]
        if here:
            at, counts = zip(*here, strict=True)
            chunks[list(at)] += counts
    return chunks


def loadable_chunks(pool: Pool[Entry], match: Match, matched: Ints, holder: Callable[[str], str]) -> Ints:
    """(n, 4) chunks behind the `matched` ones that a replica's node can load. `holder`: a node's cache, or empty."""
    holders = [holder(node) for node in pool.nodes]
    tiers = [match.tiers[tier] for tier in ("dram", "disk", "remote") if tier in match.tiers]
    if not any(holders) or not any(tier.present for tier in tiers):
        return np.zeros((len(pool.ids), TIERS), dtype=np.int64)
    holding = {name for tier in tiers for name in tier.held}
    known: dict[tuple[str, int], tuple[int, ...]] = {}

    def ahead(name: str, start: int) -> tuple[int, ...]:
        seen_as = name if name in holding else _ELSEWHERE if name else ""
        if (seen_as, start) not in known:
            known[seen_as, start] = loadable(match, start, seen_as)
        return known[seen_as, start]

    columns = np.array([ahead(name, 0) for name in holders], dtype=np.int64)[pool.node_of]
    for at in np.flatnonzero(matched).tolist():
        columns[at] = ahead(holders[pool.node_of[at]], int(matched[at]))
    return columns
