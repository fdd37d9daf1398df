"""A node's store of memory and disk on a thread of its own, and what can go wrong with it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cache_store.chunk import Header, checksum
from cache_store.chunk_path import part_path
from cache_store.config import CacheConfig
from cache_store.disk import DiskTier
from cache_store.events import ChunkKey
from cache_store.node_store import NodeStore
from cache_store.object_space import HeapHeld, HeapSpace
from cache_store.store_socket import StoreServer
from cache_store.stream import Publisher
from tests.engine.store_thread import StoreThread

MIB = 1 << 20


class TieredStore(StoreThread):
    """Chunks are written to disk as soon as they are saved. Methods are called from other threads than the store's."""

    def __init__(self, chunk_tokens: int, folder: Path, mib: int = 64) -> None:
        self._disk_folder = folder
        super().__init__(chunk_tokens, mib)

    async def _start(self) -> None:
        self.disk = DiskTier(str(self._disk_folder), 256 * MIB)
        self.store = NodeStore(
            node="node",
            config=CacheConfig.model_validate({"dram": {"eviction": "lru"}, "disk": {"admission": "always"}}),
            dram_bytes=self._mib * MIB,
            space=HeapSpace(),
            publisher=Publisher(
                holder="store", epoch=1, identity=b"", chunk_tokens=self.chunk_tokens, tiers=("dram", "disk")
            ),
            disk=self.disk,
        )
        await self.store.start()
        self.server = StoreServer(self.store, self.socket, node="node")
        self.server.start()

    # What is there

    @property
    def on_disk(self) -> set[ChunkKey]:
        return self.chunks_in("disk")

    def forget_memory(self) -> None:
        """What is on disk is there alone."""
        self.call(self.store.evict, None, ("dram",))

    def file(self, identity: bytes, key: ChunkKey) -> Path:
        return self._disk_folder / str(part_path(identity, key, 0))

    # What goes wrong

    def flip(self, key: ChunkKey, at: int, mask: int, honest: bool = True) -> None:
        """Change a byte of a payload in memory; without `honest` its header's checksum with it."""

        def change() -> None:
            part = self.store._dram.chunks[key].parts[0]
            assert part is not None
            held = part.held
            assert isinstance(held, HeapHeld)
            held._bytes[at] ^= mask
            if not honest:
                part.header = msgspec.structs.replace(part.header, checksum=checksum(held.view))

        self.call(change)

    def answer_nothing(self) -> None:
        """Look-ups find nothing, as if the chunks had come a moment later."""
        lookup = self.store.lookup
        self.store.lookup = lambda asked: lookup(  # type: ignore[method-assign]
            msgspec.structs.replace(asked, keys=bytes(len(asked.keys)))
        )

    def behave(self) -> None:
        super().behave()
        self.store.__dict__.pop("lookup", None)

    def put(self, header: Header, payload: bytes) -> str:
        outcome: str = self.run(self.store.save(header, memoryview(payload)))
        return outcome

    def part(self, key: ChunkKey) -> tuple[Header, bytes]:
        """Header and payload of a chunk in memory."""

        def found() -> tuple[Header, bytes]:
            part = self.store._dram.chunks[key].parts[0]
            assert part is not None
            return part.header, bytes(part.held.view)

        return self.call(found)

    def die_and_restart(self) -> None:
        """Its connections break and what was in memory is gone; another one finds what is on disk."""

        async def die() -> None:
            await self.server.close(drain_s=0.1)
            await self.store.close()
            await self._start()

        self.run(die())

    def check(self) -> None:
        """Raises AssertionError where the store contradicts itself or something is left of what has ended."""
        super().check()
        self.disk.check_integrity()
        stats = self.call(self.store.stats)
        assert (stats.leases, stats.leased, stats.pinned, stats.flights, stats.saving) == (0, 0, 0, 0, 0)
        assert stats.dram_in_use == stats.tiers["dram"].bytes == sum(stats.tenants.values())
