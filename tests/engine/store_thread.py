"""A node's store with its socket, on a loop and a thread of its own, for engines in this and other processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from cache_store.config import CacheConfig
from cache_store.events import ChunkKey
from cache_store.node_store import NodeStore
from cache_store.object_space import HeapSpace
from cache_store.store_socket import StoreServer
from cache_store.stream import Publisher

T = TypeVar("T")


class StoreThread:
    """Its methods are called from any thread but the store's own."""

    def __init__(self, chunk_tokens: int, mib: int = 256) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mt-store-"))
        self.socket = self.folder / "cache.sock"
        self._chunk_tokens = chunk_tokens
        self._mib = mib
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store", daemon=True)
        self._thread.start()
        self.store: NodeStore
        self.server: StoreServer
        self.run(self._start())

    async def _start(self) -> None:
        publisher = Publisher(
            holder="store", epoch=1, identity=bytes(32), chunk_tokens=self._chunk_tokens, tiers=("dram",)
        )
        self.store = NodeStore(
            node="node",
            config=CacheConfig(),
            dram_bytes=self._mib << 20,
            space=HeapSpace(),
            publisher=publisher,
        )
        await self.store.start()
        self.server = StoreServer(self.store, self.socket, node="node")
        self.server.start()

    def run(self, work: Any) -> Any:
        """The result of a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=60)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        async def called() -> T:
            return function(*args)

        result: T = self.run(called())
        return result

    @property
    def keys(self) -> set[ChunkKey]:
        """Chunks that are there, of every rank."""
        listed = self.call(self.store.ls, 100_000)
        return {ChunkKey(bytes.fromhex(info.key)) for info in listed if info.tiers}

    def clear(self) -> None:
        self.call(self.store.evict, None)

    def check(self) -> None:
        """Raises AssertionError where the store contradicts itself or something is left of what has ended."""

        async def rest() -> None:
            await self.store.settle()
            self.store.check_rest()
            self.server.check_integrity()

        self.run(rest())

    def close(self) -> None:
        async def stop() -> None:
            await self.server.close()
            await self.store.close()

        self.run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not os.path.exists(self.socket)
