"""How a node's store asks other nodes for chunks that they have in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from cache_store.chunk import Header
from cache_store.events import ChunkKey

PartName = tuple[ChunkKey, int]
"""Chunk key and rank."""


class Lent(NamedTuple):
    """A part in another node's memory."""

    header: Header
    ref: object
    """What `ObjectSpace.pull` takes."""


class Peers(Protocol):
    """The other cache actors of the cluster.

    `fetch` is awaited on the store's loop and answers within `limit_s`, or raises TimeoutError. It asks `node` for
    its `NodeStore.lend(keys, limit_s)`: those parts of the keys that are in its dram now, of every rank; absent
    keys are left out. Any other exception counts as a peer that failed. Refs may be dropped as soon as the bytes
    are copied; the lender holds the bytes for `limit_s`.
    """

    async def fetch(self, node: str, keys: Sequence[ChunkKey], limit_s: float) -> Mapping[PartName, Lent]: ...


class NoPeers:
    """A node that knows no others."""

    async def fetch(self, node: str, keys: Sequence[ChunkKey], limit_s: float) -> Mapping[PartName, Lent]:
        return {}
