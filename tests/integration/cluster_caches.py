"""Caches for the cluster in one process: a node's store behind its HTTP server, with a disk and a remote tier."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cache_store.app_server import AppServer, bound_socket
from cache_store.cache_http import CacheApp
from cache_store.cache_messages import CacheInfo
from cache_store.cache_metrics import registry
from cache_store.chunk import Header, checksum
from cache_store.config import CacheConfig
from cache_store.events import ChunkKey, Load
from cache_store.node_store import NodeStore
from cache_store.object_space import HeapSpace
from cache_store.store_socket import SocketCounters, SocketStats
from cache_store.stream import Publisher
from tests.integration.in_process import CHUNK_TOKENS, HOST, SECRET, Cluster, running, until
from tests.store_rig import MemoryFiles

CONFIG = CacheConfig.model_validate({"disk": {"admission": "always"}, "remote": {"admission": "always"}})
NBYTES = 1024
_NO_SOCKET = SocketStats(connections=0, open_requests=0, staging_bytes=0, counters=SocketCounters())
_IDLE = Load(waiting=0, running=0, prefill_tokens=0, kv_used=0.0, prefill_rate=0.0, decode_rate=0.0)


@dataclass
class NodeCache:
    info: CacheInfo
    store: NodeStore
    server: AppServer
    alive: bool = True

    async def save(self, keys: Iterable[ChunkKey], tenant: str = "") -> None:
        """As an engine of the node does."""
        for key in keys:
            payload = key * (NBYTES // len(key))
            header = Header(
                key=key, parent=bytes(32), identity=bytes(32), rank=0, world_size=1, tokens=CHUNK_TOKENS,
                dtype="float32", shape=(1, 1, NBYTES), nbytes=NBYTES, checksum=checksum(memoryview(payload)),
                created=time.time(), tenant=tenant,
            )  # fmt: skip
            assert await self.store.save(header, memoryview(payload)) in ("stored", "present")
        await self.store.settle()

    async def stop_answering(self) -> None:
        self.alive = False
        await self.server.stop()

    async def stop(self) -> None:
        if self.alive:
            await self.server.stop()
        await self.store.close()
        self.store.check_integrity()


@dataclass
class CachedCluster:
    cluster: Cluster
    caches: list[NodeCache]
    _savers: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def all_hbm(self) -> set[ChunkKey]:
        """What the replicas hold, as the router knows it."""
        index = self.cluster.core.index
        return set().union(*(index.held(node.id, "hbm") for node in self.cluster.nodes))

    def begin_saving(self) -> None:
        """From now on the first node's cache gets what replicas compute, as from their connectors."""
        self._savers.append(asyncio.get_running_loop().create_task(self._save()))

    async def _save(self) -> None:
        saved: set[ChunkKey] = set()
        while True:
            new = self.all_hbm - saved
            await self.caches[0].save(sorted(new))
            saved |= new
            await asyncio.sleep(0.002)

    async def known(self, cache: NodeCache, tier: Any, count: int) -> None:
        """Until the router knows of so many chunks there."""
        await until(lambda: len(self.cluster.core.index.held(cache.info.id, tier)) == count)

    async def stop(self) -> None:
        for task in self._savers:
            task.cancel()
        await asyncio.gather(*self._savers, return_exceptions=True)
        self.cluster.core.caches.update([])
        for cache in self.caches:
            await cache.stop()


async def start_node_cache(node: str) -> NodeCache:
    tiers = ("dram", "disk", "remote")
    publisher = Publisher(
        holder=f"cache-{node}", epoch=1, identity=b"", chunk_tokens=CHUNK_TOKENS, tiers=tiers
    )
    store = NodeStore(
        node=node, config=CONFIG, dram_bytes=1 << 20, space=HeapSpace(), publisher=publisher,
        disk=MemoryFiles(capacity=1 << 20), remote=MemoryFiles(),
    )  # fmt: skip
    await store.start()
    app = CacheApp(store, publisher, SECRET, registry(store.stats, lambda: _NO_SOCKET))
    server = AppServer([app], [bound_socket(HOST)])
    await server.start()
    publisher.report(_IDLE)
    return NodeCache(CacheInfo(f"cache-{node}", node, server.addresses[0], ""), store, server)


@contextlib.asynccontextmanager
async def running_with_caches(
    replicas: int = 2, nodes: Sequence[str] = ("aa00", "bb00"), **options: Any
) -> AsyncIterator[CachedCluster]:
    """As `running`, and its router knows the caches of these nodes."""
    async with running(replicas, **options) as cluster:
        cached = CachedCluster(cluster, [await start_node_cache(node) for node in nodes])
        try:
            cluster.core.caches.update([cache.info for cache in cached.caches])
            await until(lambda: all(entry.stream.connected for entry in cluster.core.caches))
            yield cached
        finally:
            await cached.stop()
