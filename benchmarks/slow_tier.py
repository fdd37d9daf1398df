"""A store whose remote tier reads slowly, in this process."""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from cache_store.chunk import Header
from cache_store.chunk_path import Stored
from cache_store.config import CacheConfig
from cache_store.file_tier import FileTier
from cache_store.node_store import NodeStore
from cache_store.object_space import HeapSpace
from cache_store.remote import RemoteTier
from cache_store.store_socket import StoreServer
from cache_store.stream import Publisher

T = TypeVar("T")

TIMEOUT_S = 60.0


class SlowReads:
    """A `FileTier` that takes its time to read, as a network of so many bytes per second would."""

    def __init__(self, files: FileTier, bytes_per_s: float) -> None:
        self._files = files
        self._bytes_per_s = bytes_per_s

    @property
    def capacity(self) -> int:
        return self._files.capacity

    @property
    def used(self) -> int:
        return self._files.used

    @property
    def readable(self) -> bool:
        return self._files.readable

    @property
    def writable(self) -> bool:
        return self._files.writable

    def scan(self) -> list[Stored]:
        return self._files.scan()

    def write(self, header: Header, payload: memoryview) -> int:
        return self._files.write(header, payload)

    def read_into(
        self, key: bytes, identity: bytes, rank: int, target: memoryview, *, world_size: int
    ) -> Header:
        header = self._files.read_into(key, identity, rank, target, world_size=world_size)
        time.sleep(header.nbytes / self._bytes_per_s)
        return header

    def delete(self, key: bytes, identity: bytes, rank: int) -> None:
        self._files.delete(key, identity, rank)

    def probe(self) -> bool:
        return self._files.probe()

    def close(self) -> None:
        self._files.close()


class SlowStore:
    """Made by `slow_store`. Its methods are called from any thread but the store's own."""

    def __init__(self, folder: Path, bytes_per_s: float) -> None:
        self.socket = folder / "s" / "cache.sock"
        self._folder = folder
        self._bytes_per_s = bytes_per_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow-store", daemon=True)
        self._thread.start()
        self._store, self._server = self._run(self._start())

    async def _start(self) -> tuple[NodeStore, StoreServer]:
        remote: dict[str, Any] = {
            "uri": f"file://{self._folder}/remote",
            "admission": "always",
            "timeout_s": TIMEOUT_S,
        }
        (self._folder / "remote").mkdir()
        config = CacheConfig.model_validate({"remote": remote})
        publisher = Publisher(
            holder="slow", epoch=1, identity=b"", chunk_tokens=config.chunk_tokens, tiers=("dram", "remote")
        )
        files = RemoteTier(config.remote.uri, limit_s=TIMEOUT_S)
        store = NodeStore(
            node="slow", config=config, dram_bytes=256 << 20, space=HeapSpace(), publisher=publisher,
            remote=SlowReads(files, self._bytes_per_s),
        )  # fmt: skip
        await store.start()
        server = StoreServer(store, self.socket, node="slow")
        server.start()
        return store, server

    def leave_on_slow_tier(self) -> int:
        """Wait for what is written, then forget what is in memory. How many chunks are on the slow tier."""

        async def forget() -> int:
            await self._store.settle()
            self._store.evict(None, ("dram",))
            stats = self._store.stats()
            if stats.tiers["dram"].chunks:
                raise RuntimeError(f"chunks stay in memory: {stats}")
            return stats.tiers["remote"].chunks

        return self._run(forget())

    def close(self) -> None:
        async def stop() -> None:
            await self._server.close()
            await self._store.close()

        self._run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)


@contextmanager
def slow_store(bytes_per_s: float) -> Iterator[SlowStore]:
    with tempfile.TemporaryDirectory(prefix="mb-", dir="/tmp") as folder:
        store = SlowStore(Path(folder), bytes_per_s)
        try:
            yield store
        finally:
            store.close()
