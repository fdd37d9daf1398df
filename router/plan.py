"""What a replica is told beside the request: where the cluster has chunks of its prompt.

Pure. Hints and no more: the engine computes keys itself, and asks its node's cache what is really there.
"""

from __future__ import annotations

from collections.abc import Mapping

from cache_store.wire import Source
from router.index import Match, TierMatch
from router.loadable import Loadable
from workers.messages import Plan

_NOTHING = TierMatch()
MAX_SOURCES = 64
"""Runs of chunks that a plan names; a prefix scattered more finely is loaded up to there."""


def loadable(match: Match, start: int, holder: str) -> Loadable:
    """The run of chunks from number `start` on that a node can load, cut where nobody has the next one.

    `holder` is the node's cache; empty for a node without one, which can load nothing.
    """
    if not holder:
        return Loadable()
    dram, disk, remote = (match.tiers.get(tier, _NOTHING) for tier in ("dram", "disk", "remote"))
    own_dram, own_disk = dram.held.get(holder, 0), disk.held.get(holder, 0)
    end = start + _run((dram.present | own_disk | remote.present) >> start)
    reach = _ones(start, end)
    from_dram = reach & own_dram
    from_peer = reach & dram.present & ~from_dram
    from_disk = reach & own_disk & ~from_dram & ~from_peer
    elsewhere = reach & ~from_dram & ~from_peer & ~from_disk
    return Loadable(
        from_dram.bit_count(), from_peer.bit_count(), from_disk.bit_count(), elsewhere.bit_count()
    )


def make_plan(
    match: Match, start: int, ahead: Loadable, holder: str, nodes: Mapping[str, str], tenant: str
) -> Plan:
    """The plan for a replica that has `start` chunks itself, on the node whose cache is `holder` and which can load the
    chunks `ahead` (see `loadable`).

    `nodes` are the nodes by holder. Chunks that the node has in memory are taken from there and not named.
    """
    dram = match.tiers.get("dram", _NOTHING)
    known = dram.present
    for tier in ("disk", "remote"):
        known |= match.tiers.get(tier, _NOTHING).present
    wanted = _ones(start, start + ahead.total) & ~dram.held.get(holder, 0)
    sources: list[Source] = []
    for peer, held in sorted(dram.held.items(), key=lambda item: -(item[1] & wanted).bit_count()):
        if peer != holder and peer in nodes:
            sources += [Source(nodes[peer], first, count) for first, count in _runs(held & wanted)]
            wanted &= ~held
    return Plan(tenant=tenant, sources=tuple(sources[:MAX_SOURCES]), skip_save=_run(known))


def _run(bits: int) -> int:
    """Consecutive ones from bit 0 on."""
    return (~bits & (bits + 1)).bit_length() - 1


def _ones(start: int, end: int) -> int:
    return ((1 << end) - 1) & ~((1 << start) - 1)


def _runs(bits: int) -> list[tuple[int, int]]:
    """(first bit, count) of every run of ones."""
    runs = []
    position = 0
    while bits >> position:
        rest = bits >> position
        position += (rest & -rest).bit_length() - 1
        count = _run(bits >> position)
        runs.append((position, count))
        position += count
    return runs
