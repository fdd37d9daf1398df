"""Which cache actors there are: a router asks Ray every few seconds, and has those made that are missing.

Needs Ray, and is imported by the router's deployment alone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import ray

from cache_store.cache_messages import CacheInfo
from cache_store.config import CacheConfig
from cache_store.node_actor import NAMESPACE, ensure_cache_actor, node_of
from cache_store.node_errors import CacheSetupError
from router.cache_directory import CacheDirectory

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
_RAY_TIMEOUT_S = 10.0


class CacheDiscovery:
    """Feeds a router's cache directory. Runs on the router's loop."""

    def __init__(self, caches: CacheDirectory, app: str, secret: str, config: CacheConfig) -> None:
        self._caches = caches
        self._app = app
        self._secret = secret
        self._config = config
        self._known: dict[str, CacheInfo] = {}
        self._refused: set[str] = set()
        """Nodes that can't have a cache, said once."""

    async def run(self) -> None:
        """Until cancelled. A Ray that does not answer leaves things as they are."""
        while True:
            try:
                async with asyncio.timeout(_RAY_TIMEOUT_S):
                    await self._look()
            except (ray.exceptions.RayError, RuntimeError, TimeoutError, ValueError) as error:
                logger.info("looking for cache actors: %s", str(error) or type(error).__name__)
            await asyncio.sleep(PERIOD_S)

    async def _look(self) -> None:
        listed = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        names = {each["name"] for each in listed if each["namespace"] == NAMESPACE}
        nodes = {node: name for name in names if (node := node_of(self._app, name)) is not None}
        alive = await asyncio.to_thread(_alive_nodes)
        nodes = {node: name for node, name in nodes.items() if node in alive}
        self._known = {node: info for node, info in self._known.items() if node in nodes}
        for node, name in nodes.items():
            if node not in self._known:
                self._known[node] = await _describe(name)
        if self._config.every_node:
            for node in alive - set(self._known) - self._refused:
                await self._make(node)
        self._caches.update(list(self._known.values()))

    async def _make(self, node: str) -> None:
        try:
            self._known[node] = await ensure_cache_actor(self._app, self._secret, self._config, node)
        except CacheSetupError as error:
            self._refused.add(node)
            logger.warning("node %s gets no cache: %s", node, error)


def _alive_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


async def _describe(name: str) -> CacheInfo:
    actor: Any = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
    info, _ = await actor.describe.remote()
    return msgspec.convert(info, CacheInfo)
