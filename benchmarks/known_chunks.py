"""A store that knows a million chunks: what they cost in memory, and how long it looks for some of them.

    python -m benchmarks.known_chunks CHUNKS REPEATS listed|written [traced]

`listed`: found on disk at the start, as after a restart. `written`: come one by one, as in a store that runs.

Measured in this process, which does nothing else: resident memory, so that nothing that a chunk brings about is left
out; with `traced`, what Python has allocated and not freed, and no times. The disk tier is made up; files are never
read or written.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from cache_store.chunk import Header
from cache_store.chunk_path import Stored
from cache_store.config import CacheConfig
from cache_store.entries import Kind
from cache_store.events import ChunkKey
from cache_store.node_store import NodeStore
from cache_store.object_space import HeapSpace
from cache_store.stream import Publisher
from cache_store.tier_health import PartMissing
from cache_store.wire import DISK, Lookup

IDENTITY = bytes(range(32))
PART_BYTES = 4 << 20
KEYS = 64


def main() -> None:
    chunks, repeats = map(int, sys.argv[1:3])
    listed, traced = sys.argv[3] == "listed", "traced" in sys.argv[4:]
    print(json.dumps(asyncio.run(measure(chunks, repeats, listed, traced))))


async def measure(chunks: int, repeats: int, listed: bool, traced: bool) -> dict[str, float]:
    if traced:
        tracemalloc.start()
    used: Callable[[], int] = (lambda: tracemalloc.get_traced_memory()[0]) if traced else resident
    gc.collect()
    before = used()
    publisher = Publisher(holder="bench", epoch=1, identity=b"", chunk_tokens=256, tiers=("dram", "disk"))
    store = NodeStore(
        node="node",
        config=CacheConfig.model_validate({"disk": {"path": "none", "timeout_s": 600}}),
        dram_bytes=64 << 20,
        space=HeapSpace(),
        publisher=publisher,
        disk=ListedFiles(chunks if listed else 0),
    )
    await store.start()
    if not listed:
        (shelf,) = store._shelves
        kind = Kind(IDENTITY, 1, "")
        for number in range(chunks):
            shelf.note(key_of(number), 0, kind, PART_BYTES + 300, PART_BYTES, 0.5)
    gc.collect()
    known = store.stats().tiers["disk"].chunks
    assert known == chunks, f"{known} of {chunks} chunks are known"
    bytes_per_chunk = (used() - before) / chunks
    if traced:
        return {"bytes_per_chunk": bytes_per_chunk}
    seconds = await look_up(store, chunks, repeats)
    store.check_rest()
    await store.close()
    seconds.sort()
    return {
        "bytes_per_chunk": bytes_per_chunk,
        "p50_us": seconds[len(seconds) // 2] * 1e6,
        "p99_us": seconds[int(0.99 * len(seconds))] * 1e6,
    }


async def look_up(store: NodeStore, chunks: int, repeats: int) -> list[float]:
    """Seconds of each look-up of a prompt's keys, which came one after the other, with the end of its lease.

    The lease ends before the moves begin that a look-up sets off, so that no file is asked for.
    """
    draw, seconds = random.Random(2), []
    for number in range(repeats):
        first = draw.randrange(chunks - KEYS)
        keys = b"".join(key_of(first + each) for each in range(KEYS))
        began = time.perf_counter()
        found = store.lookup(Lookup(number, keys, 1))
        store.release(found.lease)
        seconds.append(time.perf_counter() - began)
        assert found.tiers == bytes([DISK]) * KEYS
        await store.settle()
    return seconds


def key_of(number: int) -> ChunkKey:
    return ChunkKey(random.Random(number).randbytes(32))


class ListedFiles:
    """A `FileTier` that says to have parts, and has none."""

    capacity = 0
    used = 0
    readable = True
    writable = True

    def __init__(self, count: int) -> None:
        self._count = count

    def scan(self) -> list[Stored]:
        return [
            Stored(IDENTITY, key_of(n), 0, 1, PART_BYTES, PART_BYTES + 300, 1000.0 + n, 0.5)
            for n in range(self._count)
        ]

    def write(self, header: Header, payload: memoryview) -> int:
        raise AssertionError("nothing is written here")

    def read_into(
        self, key: bytes, identity: bytes, rank: int, target: memoryview, *, world_size: int
    ) -> Header:
        raise PartMissing("there are no files")

    def delete(self, key: bytes, identity: bytes, rank: int) -> None: ...

    def probe(self) -> bool:
        return True

    def close(self) -> None: ...


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
