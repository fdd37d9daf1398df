"""What a node's store tells people about itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from cache_store.dram import Dram
from cache_store.entries import Entries
from cache_store.events import ChunkKey
from cache_store.leases import Leases
from cache_store.shelf import Shelf
from cache_store.store_stats import ChunkInfo, TierStats

Known = Mapping[ChunkKey, object] | Entries


def tier_stats(dram: Dram, shelves: Sequence[Shelf]) -> dict[str, TierStats]:
    tiers = {"dram": TierStats(dram.count, dram.bytes, dram.budget)}
    for shelf in shelves:
        tiers[shelf.tier] = TierStats(shelf.count, shelf.entries.bytes, shelf.capacity, shelf.working)
    return tiers


def chunk_infos(
    limit: int, now: float, dram: Dram, shelves: Sequence[Shelf], leases: Leases
) -> Iterator[ChunkInfo]:
    """At most `limit`, those in dram first. The store must not change meanwhile."""
    held: list[Known] = [dram.chunks, *[shelf.entries for shelf in shelves]]
    keys = itertools.chain.from_iterable(
        (key for key in tier if not any(key in faster for faster in held[:place]))
        for place, tier in enumerate(held)
    )
    for key in itertools.islice(keys, max(limit, 0)):
        yield _chunk_info(key, now, dram, shelves, leases)


def _chunk_info(key: ChunkKey, now: float, dram: Dram, shelves: Sequence[Shelf], leases: Leases) -> ChunkInfo:
    tiers, nbytes, world_size, tenant, used, cost_s = list[str](), 0, 0, "", float("-inf"), 0.0
    chunk = dram.chunks.get(key)
    if chunk is not None:
        nbytes, world_size, tenant = chunk.nbytes, len(chunk.parts), chunk.tenant
        used, cost_s = chunk.used, chunk.cost_s
        if chunk.complete:
            tiers.append("dram")
    for shelf in shelves:
        entry = shelf.entries.get(key)
        if entry is not None:
            nbytes, world_size = nbytes or entry.nbytes, world_size or entry.kind.world_size
            tenant, used = tenant or entry.kind.tenant, max(used, entry.used)
            cost_s = cost_s or entry.cost_s
            if entry.complete:
                tiers.append(shelf.tier)
    leased, pinned = leases.is_leased(key), leases.is_pinned(key)
    return ChunkInfo(key.hex(), tuple(tiers), nbytes, world_size, tenant, now - used, cost_s, leased, pinned)
