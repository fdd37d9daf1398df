"""`CacheActor`: a node's cache as a Ray actor. Everything it can do without Ray is in `cache_store.node_store`."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray

from cache_store.app_server import AppServer, bound_socket
from cache_store.cache_http import CacheApp
from cache_store.cache_messages import CacheInfo
from cache_store.cache_metrics import registry
from cache_store.config import CacheConfig
from cache_store.events import ChunkKey, Load, Tier
from cache_store.memory_budget import dram_budget
from cache_store.node_actor import actor_name, socket_path, spec_digest
from cache_store.node_address import node_address
from cache_store.node_errors import CacheSetupError
from cache_store.node_store import NodeStore
from cache_store.ray_objects import RayObjectSpace
from cache_store.ray_peers import RayPeers
from cache_store.store_socket import StoreServer
from cache_store.stream import Publisher

logger = logging.getLogger(__name__)

_BEAT_S = 1.0
_BIND_TRIES = 50
_BIND_PAUSE_S = 0.1


class CacheActor:
    """One per node, named and detached, restarted by Ray with what is on its disk.

    It is the owner of all objects that it puts, so they outlive the engines that computed them and end with it.
    """

    async def __init__(self, app: str, secret: str, config: dict[str, Any], port: int) -> None:  # type: ignore[misc]
        """`port` is kept over restarts, so that routers find the actor where it was."""
        self._config = CacheConfig.model_validate(config)
        self._node = ray.get_runtime_context().get_node_id()
        self._info = CacheInfo(
            actor_name(app, self._node), self._node, f"{node_address()}:{port}", socket_path(app, self._node)
        )
        tiers, disk, remote = await asyncio.to_thread(self._tiers)
        publisher = Publisher(
            holder=self._info.id, epoch=secrets.randbits(63), identity=b"",
            chunk_tokens=self._config.chunk_tokens, tiers=tiers,
        )  # fmt: skip
        self._store = NodeStore(
            node=self._node,
            config=self._config,
            dram_bytes=dram_budget(self._config.dram.mib << 20, _object_store_bytes(self._node)),
            space=RayObjectSpace(),
            publisher=publisher,
            disk=disk,
            remote=remote,
            peers=RayPeers(app),
        )
        await self._store.start()
        self._server = StoreServer(self._store, Path(self._info.socket), node=self._node)
        self._server.start()
        metrics = registry(self._store.stats, self._server.stats)
        listening = await _bound(port)
        self._http = AppServer([CacheApp(self._store, publisher, secret, metrics)], [listening])
        await self._http.start()
        self._beating = asyncio.create_task(_beat(publisher))

    def _tiers(self) -> tuple[list[Tier], Any, Any]:
        """Raises CacheSetupError for a folder or URI that can't be used."""
        from cache_store.disk import DiskTier
        from cache_store.remote import RemoteTier

        tiers: list[Tier] = ["dram"]
        disk = remote = None
        try:
            if self._config.disk.path:
                disk = DiskTier(
                    self._config.disk.path, self._config.disk.mib << 20, limit_s=self._config.disk.timeout_s
                )
                disk.claim()
                tiers.append("disk")
            if self._config.remote.uri:
                remote = RemoteTier(self._config.remote.uri, limit_s=self._config.remote.timeout_s)
                tiers.append("remote")
        except (OSError, ValueError) as error:
            raise CacheSetupError(str(error)) from error
        return tiers, disk, remote

    async def describe(self) -> tuple[dict[str, Any], str]:
        """`CacheInfo` as a map, and the digest of what this actor was made from."""
        return msgspec.to_builtins(self._info), spec_digest(self._config)

    async def parts(self, keys: Sequence[bytes]) -> tuple[bytes, list[Any]]:
        """For `RayPeers`: headers (msgpack) and object references of the parts that are in memory here."""
        # The other side has given up by then; Ray keeps the bytes of what it still reads.
        lent = self._store.lend([ChunkKey(key) for key in keys], self._config.dram.pull_timeout_s)
        return msgspec.msgpack.encode([part.header for part in lent.values()]), [
            part.ref for part in lent.values()
        ]

    async def pid(self) -> int:
        return os.getpid()

    async def check_integrity(self) -> None:
        """Raises AssertionError when the store contradicts itself."""
        self._store.check_integrity()


async def _beat(publisher: Publisher) -> None:
    """Readers take a silent stream for a broken one, and notice a lost delta by the number in the report."""
    idle = Load(waiting=0, running=0, prefill_tokens=0, kv_used=0.0, prefill_rate=0.0, decode_rate=0.0)
    while True:
        publisher.report(idle)
        await asyncio.sleep(_BEAT_S)


async def _bound(port: int) -> Any:
    """The port's socket. After a restart the system may hold it for a moment. Raises CacheSetupError."""
    for attempt in range(_BIND_TRIES):
        try:
            return bound_socket(node_address(), port)
        except OSError as error:
            if attempt == _BIND_TRIES - 1:
                raise CacheSetupError(f"port {port} of {node_address()} can't be bound: {error}") from error
            await asyncio.sleep(_BIND_PAUSE_S)
    raise AssertionError("unreachable")


def _object_store_bytes(node: str) -> int:
    """Size of a node's object store, as Ray counts it."""
    for each in ray.nodes():
        if each["NodeID"] == node:
            return int(each["Resources"].get("object_store_memory", 0))
    raise CacheSetupError(f"Ray does not know the node {node} that this runs on")
