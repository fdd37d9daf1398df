"""Chunks of other nodes' cache actors, by object references that Ray moves.

Needs Ray, and is imported by the cache actor alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import ray

from cache_store.chunk import Header
from cache_store.events import ChunkKey
from cache_store.node_actor import NAMESPACE, actor_name
from cache_store.peers import Lent, PartName

_decode = msgspec.msgpack.Decoder(list[Header])


class RayPeers:
    """See `cache_store.peers.Peers`."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._actors: dict[str, Any] = {}

    async def fetch(self, node: str, keys: Sequence[ChunkKey], limit_s: float) -> dict[PartName, Lent]:
        try:
            async with asyncio.timeout(limit_s):
                headers, refs = await (await self._actor(node)).parts.remote(list(keys))
        except BaseException:
            # The node may have another actor by now.
            self._actors.pop(node, None)
            raise
        found = zip(_decode.decode(headers), refs, strict=True)
        return {(ChunkKey(header.key), header.rank): Lent(header, ref) for header, ref in found}

    async def _actor(self, node: str) -> Any:
        """Raises ValueError where there is none."""
        found = self._actors.get(node)
        if found is None:
            name = actor_name(self._app, node)
            found = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            self._actors[node] = found
        return found
