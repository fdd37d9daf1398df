"""Where an engine finds its node's cache actor."""

from __future__ import annotations

from typing import Literal, NamedTuple


class StoreAddress(NamedTuple):
    """What a replica tells its engine. The rest (chunk size, staging, whether to share) is in `CacheConfig`."""

    socket: str
    """Path of the actor's Unix socket."""
    engine: str
    """Replica id, by which the actor's messages name the engine."""
    load_when: Literal["faster", "always"] = "faster"
    """`faster`: chunks are loaded when measured rates say that it beats computing them."""
