"""Which slower tiers a node has, by its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cache_store.admission import admission_from
from cache_store.config import CacheConfig
from cache_store.events import Tier
from cache_store.eviction import Eviction, eviction_from
from cache_store.file_tier import FileTier
from cache_store.leases import Leases
from cache_store.shelf import Shelf
from cache_store.store_stats import StoreCounters
from cache_store.stream import Publisher

RELIST_S = 60.0
"""How often is looked what other nodes have put into the remote tier."""


def shelves(
    config: CacheConfig,
    disk: FileTier | None,
    remote: FileTier | None,
    leases: Leases,
    publisher: Publisher,
    counters: StoreCounters,
    clock: Callable[[], float],
) -> Iterator[Shelf]:
    """The fastest first."""

    def shelf(
        tier: Tier,
        files: FileTier,
        eviction: Eviction | None,
        admission: str,
        timeout_s: float,
        rescan_s: float | None,
    ) -> Shelf:
        return Shelf(
            tier,
            files,
            eviction=eviction,
            admission=admission_from(admission),
            timeout_s=timeout_s,
            max_writing=config.save_mib_in_flight << 20,
            leases=leases,
            publisher=publisher,
            counters=counters,
            clock=clock,
            rescan_s=rescan_s,
        )

    if disk is not None:
        eviction = eviction_from(config.disk.eviction)
        yield shelf("disk", disk, eviction, config.disk.admission, config.disk.timeout_s, None)
    if remote is not None:
        yield shelf("remote", remote, None, config.remote.admission, config.remote.timeout_s, RELIST_S)
