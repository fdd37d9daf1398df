"""What a node's store counts and what it tells about itself."""

from __future__ import annotations

import msgspec

from cache_store.wire import TIER_NAMES, LoadOutcome, SaveOutcome


def _by_tier() -> dict[str, int]:
    return dict.fromkeys(TIER_NAMES, 0)


class StoreCounters(msgspec.Struct):
    """Totals since the start. Dicts by tier have the names of `cache_store.wire.TIER_NAMES`."""

    lookups: int = 0
    found: dict[str, int] = msgspec.field(default_factory=_by_tier)
    """Keys asked for, by the tier in which they were found."""
    saves: dict[SaveOutcome, int] = msgspec.field(
        default_factory=lambda: {"stored": 0, "present": 0, "dropped": 0, "refused": 0}
    )
    drops: dict[str, int] = msgspec.field(
        default_factory=lambda: {"in_flight": 0, "no_room": 0, "quota": 0, "failed": 0}
    )
    """Why saves were dropped."""
    saved_bytes: int = 0
    loads: dict[LoadOutcome, int] = msgspec.field(
        default_factory=lambda: {"loaded": 0, "missing": 0, "corrupt": 0, "late": 0}
    )
    loaded_bytes: dict[str, int] = msgspec.field(default_factory=_by_tier)
    """Bytes handed to engines, by the tier that they came from."""
    moved: dict[str, int] = msgspec.field(default_factory=_by_tier)
    """Parts brought into this node's dram, by the tier that they came from."""
    moves_failed: dict[str, int] = msgspec.field(
        default_factory=lambda: {"missing": 0, "corrupt": 0, "late": 0, "no_room": 0}
    )
    peer_failures: int = 0
    """Requests to other nodes that failed or came too late."""
    prefetched: int = 0
    """Chunks that routers asked to have in dram ahead of their request, and that were there or set out for."""
    prefetches_refused: int = 0
    """Chunks that were over what is kept ahead of requests, some of them when their size became known."""
    lent: int = 0
    """Parts lent to other nodes."""
    corrupt: dict[str, int] = msgspec.field(default_factory=_by_tier)
    """Parts found to be not what their header says, by tier."""
    writes: dict[str, int] = msgspec.field(default_factory=_by_tier)
    """Parts written, by tier."""
    writes_dropped: dict[str, int] = msgspec.field(default_factory=_by_tier)
    """Parts admitted to a tier and not written: too many bytes in flight, no room, or the tier failed."""
    evicted: dict[str, int] = msgspec.field(default_factory=_by_tier)
    """Chunks that left a tier to make room."""
    expired: int = 0
    """Chunks that left a tier because nobody used them."""


class TierStats(msgspec.Struct, frozen=True):
    chunks: int
    """Complete ones: every rank's part is there."""
    bytes: int
    capacity: int
    """0 for no limit."""
    healthy: bool = True


class StoreStats(msgspec.Struct, frozen=True):
    """A moment of a node's store. Units: bytes and seconds."""

    node: str
    tiers: dict[str, TierStats]
    """`dram`, and `disk` and `remote` where there are such."""
    dram_in_use: int
    """Bytes that count against the budget: chunks, chunks that left but are still read, copies on their way."""
    dram_leaving: int
    """Of those: left, still read or borrowed."""
    saving: int
    """Bytes of saves in flight."""
    leases: int
    leased: int
    """Chunks under a lease."""
    pinned: int
    flights: int
    """Parts on their way to dram."""
    tenants: dict[str, int]
    """Bytes in dram by tenant."""
    seconds_per_byte: tuple[float, float, float, float, float]
    """By tier code; 0 for never measured."""
    counters: StoreCounters


class ChunkInfo(msgspec.Struct, frozen=True):
    """One chunk, for people."""

    key: str
    """Hex."""
    tiers: tuple[str, ...]
    nbytes: int
    """All ranks together."""
    world_size: int
    tenant: str
    idle_s: float
    """Since it was last used."""
    cost_s: float
    leased: bool
    pinned: bool
