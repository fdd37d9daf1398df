"""Where a node's cache actor is, and what routers ask of it over HTTP: msgpack bodies, behind the cluster's secret."""

from __future__ import annotations

import msgspec

from cache_store.wire import Source

PREFETCH_PATH = "/manta/cache/prefetch"
"""POST KeysRequest: begin to move the leading run to this node's memory. Answer: Affected."""
WHERE_PATH = "/manta/cache/lookup"
"""POST KeysRequest. Answer: Where."""
PIN_PATH = "/manta/cache/pin"
UNPIN_PATH = "/manta/cache/unpin"
EVICT_PATH = "/manta/cache/evict"
"""POST KeysRequest, empty keys for all chunks. Answer: Affected."""
STATS_PATH = "/manta/cache/stats"
"""GET. Answer: `cache_store.store_stats.StoreStats`."""
LIST_PATH = "/manta/cache/ls"
"""GET `?limit=`. Answer: a list of `cache_store.store_stats.ChunkInfo`."""
METRICS_PATH = "/metrics"

MAX_LISTED = 10_000


class CacheInfo(msgspec.Struct, frozen=True):
    """A node's cache actor, as routers and engines need to know it."""

    id: str
    """Holder id in the event stream."""
    node: str
    """Ray node id, hex."""
    address: str
    """host:port of its HTTP server."""
    socket: str
    """Path of the Unix socket for the engines of its node."""


class KeysRequest(msgspec.Struct, frozen=True):
    keys: bytes
    """Chunk keys, concatenated, in the order of the prompt."""
    sources: tuple[Source, ...] = ()
    world_size: int = 1


class Affected(msgspec.Struct, frozen=True):
    chunks: int


class Where(msgspec.Struct, frozen=True):
    tiers: list[tuple[str, ...]]
    """Per key, the tiers of this node that hold the whole chunk."""
