"""A node's store with its socket, on a loop and a thread of its own, for engines in this and other processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from cache_store.config import CacheConfig
from cache_store.events import ChunkKey
from cache_store.node_store import LoadResult, NodeStore
from cache_store.object_space import HeapSpace
from cache_store.store_socket import StoreServer
from cache_store.stream import Publisher

T = TypeVar("T")
Load = Callable[[ChunkKey], Awaitable[LoadResult]]


class StoreThread:
    """Its methods are called from any thread but the store's own."""

    def __init__(self, chunk_tokens: int, mib: int = 256) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="mt-store-"))
        self.socket = self.folder / "cache.sock"
        self.chunk_tokens = chunk_tokens
        self._mib = mib
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store", daemon=True)
        self._thread.start()
        self.store: NodeStore
        self.server: StoreServer
        self.run(self._start())

    async def _start(self) -> None:
        publisher = Publisher(
            holder="store", epoch=1, identity=bytes(32), chunk_tokens=self.chunk_tokens, tiers=("dram",)
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
    def in_memory(self) -> set[ChunkKey]:
        """Chunks that are there, of every rank."""
        return self.chunks_in("dram")

    def chunks_in(self, tier: str) -> set[ChunkKey]:
        return self.call(
            lambda: {ChunkKey(bytes.fromhex(c.key)) for c in self.store.ls(100_000) if tier in c.tiers}
        )

    def nothing_open(self) -> bool:
        """No request of an engine, and no lease."""
        return not self.call(lambda: self.server.stats().open_requests + self.store.stats().leases)

    def change_loads(self, load_into: Callable[..., Awaitable[LoadResult]]) -> None:
        """Loads are this one's, until the store is to `behave`; the store's own is `store.load_into` before."""
        self.store.load_into = load_into  # type: ignore[method-assign,assignment]

    def on_load(self, key: ChunkKey, do: Callable[[Load], Awaitable[LoadResult]]) -> None:
        """What happens when this chunk is asked for; `do` runs on the store's loop and is given the real load."""
        load_into = self.store.load_into

        async def changed(asked: ChunkKey, rank: int, target: memoryview, limit_s: float) -> LoadResult:
            if asked != key:
                return await load_into(asked, rank, target, limit_s)
            return await do(lambda other: load_into(other, rank, target, limit_s))

        self.change_loads(changed)

    def hold_load_of(self, key: ChunkKey) -> Hold:
        """Loads of this chunk wait until they are let go on."""
        return Hold(self, key)

    def behave(self) -> None:
        """Be a store like any other again."""
        self.store.__dict__.pop("load_into", None)

    def clear(self) -> None:
        """Nothing is anywhere, and no file is left to be deleted."""

        async def cleared() -> None:
            self.store.evict(None)
            await self.store.settle()

        self.run(cleared())

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


class Hold:
    """A context manager: within it loads of one chunk wait."""

    def __init__(self, store: StoreThread, key: ChunkKey) -> None:
        self._store = store
        self._key = key
        self.waiting = threading.Event()
        """A load has come."""
        self._open = asyncio.Event()

    def __enter__(self) -> Hold:
        async def wait(load: Load) -> LoadResult:
            self.waiting.set()
            await self._open.wait()
            return await load(self._key)

        self._store.on_load(self._key, wait)
        return self

    def __exit__(self, *error: object) -> None:
        self._store.behave()
        self._store._loop.call_soon_threadsafe(self._open.set)
