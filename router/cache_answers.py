"""What `/admin/cache/*` answers, as JSON. In all of them `problems` says, by node, why that node told nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cache_store.store_stats import ChunkInfo, StoreCounters, StoreStats, TierStats

Problems = dict[str, str]


class Totals(msgspec.Struct, frozen=True):
    """All nodes that answered, added up."""

    tiers: dict[str, TierStats]
    """`remote` is one store that every node sees: of that, what the node that knows most of it told."""
    counters: StoreCounters


class Stats(msgspec.Struct, frozen=True):
    nodes: list[StoreStats]
    totals: Totals
    hbm: dict[str, int]
    """Chunks in the engine's own KV blocks, by replica."""
    problems: Problems


class ListedChunk(ChunkInfo, frozen=True, kw_only=True):
    node: str


class Listing(msgspec.Struct, frozen=True):
    chunks: list[ListedChunk]
    """Some of what there is, those in dram before others; what was used last comes first."""
    more: bool
    """Whether the limit left some out."""
    problems: Problems


class ChunkPlaces(msgspec.Struct, frozen=True):
    """Where one chunk is, whole."""

    key: str
    """Hex."""
    tokens: int
    """Of the prompt, from its start to the end of this chunk; 0 for a chunk that was named by its key."""
    hbm: list[str]
    """Replicas."""
    dram: list[str]
    """Nodes, as in the tiers below."""
    disk: list[str]
    remote: list[str]

    @property
    def held(self) -> bool:
        return bool(self.hbm or self.dram or self.disk or self.remote)


class NamedChunks(msgspec.Struct, frozen=True):
    """The chunks of a prompt for engines of one kind: other weights, data types or layouts have other keys."""

    identity: str
    """Digest of all that KV depends on but tokens, adapter and tenant, hex; empty for chunks named by their keys."""
    chunk_tokens: int
    replicas: list[str]
    """Of this kind."""
    chunks: list[ChunkPlaces]
    covered_tokens: int
    """Of the prompt, the leading ones in chunks that are held somewhere."""


class Lookup(msgspec.Struct, frozen=True):
    prompt_tokens: int
    """0 where chunks were named by their keys."""
    shareable_tokens: int
    """Leading ones whose KV the tokens alone determine; nothing behind them is shared."""
    engines: list[NamedChunks]
    problems: Problems


class Changed(msgspec.Struct, frozen=True):
    """What came of pin, unpin or evict."""

    chunks: int | None
    """That were named; null for all."""
    nodes: dict[str, int]
    """How many of them were pinned, unpinned or evicted, by node."""
    problems: Problems


class Warmed(msgspec.Struct, frozen=True):
    """One prompt whose KV was computed or found."""

    replica: str
    prompt_tokens: int
    cached: dict[str, int]
    """Tokens that were not computed for this, by the tier that their KV came from."""
    computed: int
    chunks: int
    """Whole chunks of the prompt."""
    stored: int
    """Of those, the ones that a store of the cluster (dram, disk or remote) held when the wait for them ended."""


def totals(nodes: Sequence[StoreStats]) -> Totals:
    names = dict.fromkeys(name for node in nodes for name in node.tiers)
    tiers = {name: _tier(name, [n.tiers[name] for n in nodes if name in n.tiers]) for name in names}
    counted = _added([msgspec.to_builtins(node.counters) for node in nodes])
    return Totals(tiers, msgspec.convert(counted or {}, StoreCounters))


def _tier(name: str, told: Sequence[TierStats]) -> TierStats:
    healthy = all(each.healthy for each in told)
    if name == "remote":
        most = max(told, key=lambda each: each.chunks)
        return msgspec.structs.replace(most, healthy=healthy)
    unbounded = not all(each.capacity for each in told)
    return TierStats(
        chunks=sum(each.chunks for each in told),
        bytes=sum(each.bytes for each in told),
        capacity=0 if unbounded else sum(each.capacity for each in told),
        healthy=healthy,
    )


def _added(values: Sequence[Any]) -> Any:
    """Numbers added up, in maps of equal shape."""
    if not values or not isinstance(values[0], dict):
        return sum(values)
    return {name: _added([value.get(name, 0) for value in values]) for name in values[0]}
