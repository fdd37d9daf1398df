"""A node's store on the heap with everything around it in hand: clock, files, other nodes."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from cache_store.chunk import ChunkError, Header, checksum
from cache_store.chunk_path import Stored
from cache_store.config import CacheConfig
from cache_store.events import ChunkKey, Tier
from cache_store.file_tier import FileTier
from cache_store.node_store import LoadResult, NodeStore
from cache_store.object_space import HeapHeld, HeapSpace
from cache_store.peers import Lent, PartName
from cache_store.stream import Publisher
from cache_store.tier_health import NoRoom, PartMissing, TierUnavailable
from cache_store.wire import Found, Lookup, Source

LIMIT_S = 30.0
NBYTES = 4096
IDENTITY = bytes([7]) * 32


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "little"))


def payload(number: int, rank: int = 0, nbytes: int = NBYTES) -> bytes:
    return (number * 64 + rank + 1).to_bytes(4, "big") * (nbytes // 4)


def header(
    number: int,
    rank: int = 0,
    world_size: int = 1,
    nbytes: int = NBYTES,
    tenant: str = "",
    cost_s: float = 0.0,
    identity: bytes = IDENTITY,
) -> Header:
    return Header(
        key=key(number),
        parent=key(number - 1) if number else bytes(32),
        identity=identity,
        rank=rank,
        world_size=world_size,
        tokens=256,
        dtype="float32",
        shape=(2, 2, nbytes // 4),
        nbytes=nbytes,
        checksum=checksum(payload(number, rank, nbytes)),
        created=1e9 + number,
        tenant=tenant,
        cost_s=cost_s,
    )


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Gate:
    """Lets work through while it is open."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = 0

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        self.waiting += 1
        try:
            assert self._open.wait(LIMIT_S), "the gate was not opened"
        finally:
            self.waiting -= 1


class MemoryFiles:
    """A `FileTier` in memory that can be slow, off, or wrong."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.parts: dict[PartName, tuple[Header, bytes]] = {}
        self.reading, self.writing, self.deleting = Gate(), Gate(), Gate()
        self.readable = self.writable = True
        self.reads = self.probes = 0
        self.closed = False

    @property
    def used(self) -> int:
        return sum(len(data) for _, data in self.parts.values())

    def scan(self) -> list[Stored]:
        if not self.readable:
            raise TierUnavailable("off")
        return [
            Stored(
                h.identity,
                ChunkKey(h.key),
                h.rank,
                h.world_size,
                h.nbytes,
                h.nbytes,
                h.created,
                h.cost_s,
                h.tenant,
            )
            for h, _ in sorted(self.parts.values(), key=lambda part: part[0].created)
        ]

    def write(self, header: Header, payload: memoryview) -> int:
        self.writing.pass_through()
        if not self.writable:
            raise TierUnavailable("off")
        if self.capacity and self.used + header.nbytes > self.capacity:
            raise NoRoom("full")
        self.parts[ChunkKey(header.key), header.rank] = header, bytes(payload)
        return header.nbytes

    def read_into(
        self, key: bytes, identity: bytes, rank: int, target: memoryview, *, world_size: int
    ) -> Header:
        self.reads += 1
        self.reading.pass_through()
        if not self.readable:
            raise TierUnavailable("off")
        found = self.parts.get((ChunkKey(key), rank))
        if found is None:
            raise PartMissing
        header, data = found
        if checksum(data) != header.checksum:
            del self.parts[ChunkKey(key), rank]
            raise ChunkError("flipped", "checksum")
        target[: len(data)] = data
        return header

    def delete(self, key: bytes, identity: bytes, rank: int) -> None:
        self.deleting.pass_through()
        self.parts.pop((ChunkKey(key), rank), None)

    def probe(self) -> bool:
        self.probes += 1
        return self.readable and self.writable

    def close(self) -> None:
        self.closed = True

    def check_integrity(self) -> None:
        """Nothing to contradict."""


class GatedSpace(HeapSpace):
    """Puts can be held up or refused; counts what was not freed."""

    def __init__(self) -> None:
        self.putting = Gate()
        self.full = False
        self.puts: list[HeapHeld] = []
        self.pull_error: Exception | None = None

    def put(self, payload: memoryview) -> HeapHeld:
        self.putting.pass_through()
        if self.full:
            raise MemoryError("full")
        held = super().put(payload)
        self.puts.append(held)
        return held

    def pull(self, ref: object, timeout_s: float) -> HeapHeld:
        if self.pull_error is not None:
            raise self.pull_error
        held = super().pull(ref, timeout_s)
        self.puts.append(held)
        return held

    @property
    def bytes(self) -> int:
        return sum(held.nbytes for held in self.puts if not held.freed)


class OtherNodes:
    """`Peers` that are stores of the same process."""

    def __init__(self) -> None:
        self.stores: dict[str, NodeStore] = {}
        self.fetches: list[tuple[str, list[ChunkKey]]] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def fetch(self, node: str, keys: Sequence[ChunkKey], limit_s: float) -> Mapping[PartName, Lent]:
        self.fetches.append((node, list(keys)))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.stores[node].lend(keys, limit_s)


class Rig:
    """Make it where a loop runs, and `close` it there: that checks that nothing is left."""

    def __init__(
        self,
        *,
        chunks: int = 8,
        disk: FileTier | None = None,
        remote: FileTier | None = None,
        node: str = "here",
        others: OtherNodes | None = None,
        disk_config: Mapping[str, object] | None = None,
        remote_config: Mapping[str, object] | None = None,
        **config: object,
    ) -> None:
        """`chunks` of `NBYTES` fit into memory; slower tiers take in everything at once."""
        self.clock = Clock()
        self.space = GatedSpace()
        self.disk, self.remote = disk, remote
        tiers: list[Tier] = ["dram"]
        tiers += ["disk"] if disk is not None else []
        tiers += ["remote"] if remote is not None else []
        self.publisher = Publisher(holder="cache", epoch=1, identity=bytes(32), chunk_tokens=256, tiers=tiers)
        self.store = NodeStore(
            node=node,
            config=CacheConfig.model_validate(
                {
                    "dram": {"eviction": "lru"},
                    "disk": {"admission": "always", **(disk_config or {})},
                    "remote": {"admission": "always", **(remote_config or {})},
                    **config,
                }
            ),
            dram_bytes=chunks * NBYTES,
            space=self.space,
            publisher=self.publisher,
            disk=disk,
            remote=remote,
            peers=others,
            clock=self.clock,
        )
        self._ids = 0

    async def save(self, number: int, rank: int = 0, world_size: int = 1, **fields: Any) -> str:
        made = header(number, rank, world_size, **fields)
        return await self.store.save(made, memoryview(payload(number, rank, made.nbytes)))

    def lookup(
        self, *numbers: int, world_size: int = 1, sources: tuple[Source, ...] = (), lease_s: float = 60.0
    ) -> Found:
        self._ids += 1
        keys = b"".join(key(number) for number in numbers)
        return self.store.lookup(Lookup(self._ids, keys, world_size, sources, lease_s))

    def tiers(self, *numbers: int, world_size: int = 1) -> list[int]:
        found = self.lookup(*numbers, world_size=world_size)
        self.store.release(found.lease)
        return list(found.tiers)

    async def load(self, number: int, rank: int = 0, limit_s: float = LIMIT_S) -> LoadResult:
        """Raises AssertionError when what is said to be loaded is not the chunk, or anything behind it is touched."""
        target = bytearray(NBYTES + 64)
        view = memoryview(target)
        result = await self.store.load_into(key(number), rank, view, limit_s)
        view.release()
        if result.header is not None:
            nbytes = result.header.nbytes
            assert target[:nbytes] == payload(number, rank, nbytes)
            assert result.header == header(
                number,
                rank,
                result.header.world_size,
                nbytes,
                result.header.tenant,
                result.header.cost_s,
            )
            assert not any(target[nbytes:])
        return result

    def published(self, tier: Tier) -> set[int]:
        return {int.from_bytes(key, "little") for key in self.publisher.keys(tier)}

    def open_gates(self) -> None:
        self.space.putting.open()
        for files in (self.disk, self.remote):
            if isinstance(files, MemoryFiles):
                files.reading.open()
                files.writing.open()
                files.deleting.open()

    async def close(self) -> None:
        await self.store.settle()
        self.store.check_rest()
        await self.store.close()
        assert self.space.bytes == 0


@asynccontextmanager
async def rigged(**options: Any) -> AsyncIterator[Rig]:
    """A rig that has started, and of which nothing is left afterwards."""
    made = Rig(**options)
    await made.store.start()
    try:
        yield made
    finally:
        made.open_gates()
    await made.close()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.001)


def flipped(header: Header) -> Header:
    return msgspec.structs.replace(header, checksum=bytes(16))
