"""Writing chunks from memory on to slower tiers, when those admit them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from cache_store.dram import Dram, DramChunk, Part
from cache_store.events import ChunkKey
from cache_store.shelf import Shelf


class WriteBehind:
    """Belongs to the store's loop. Nobody waits for a write; its parts stay in memory until it has ended."""

    def __init__(self, dram: Dram, shelves: Sequence[Shelf]) -> None:
        self._dram = dram
        self._shelves = shelves
        self._writes: set[asyncio.Task[None]] = set()
        self._closed = False
        for shelf in shelves:
            shelf.on_left = partial(self._left, shelf)

    def __len__(self) -> int:
        """Writes under way."""
        return len(self._writes)

    def touched(self, chunk: DramChunk) -> None:
        """A chunk that is complete in memory was saved, or asked for: the tiers that lack it may want it now."""
        for shelf in self._shelves:
            self._offer(shelf, chunk)

    def _left(self, shelf: Shelf, key: ChunkKey) -> None:
        """A chunk was touched while its file was still there to be deleted. Now it may be written anew."""
        chunk = self._dram.chunks.get(key)
        if chunk is not None and chunk.complete and not self._closed:
            self._offer(shelf, chunk)

    def _offer(self, shelf: Shelf, chunk: DramChunk) -> None:
        parts = [part for part in chunk.parts if part is not None]
        if shelf.admit(chunk.key, chunk.nbytes, len(parts)):
            for part in parts:
                self._dram.borrow(part)
            write = asyncio.get_running_loop().create_task(self._write(shelf, chunk, parts))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)

    async def _write(self, shelf: Shelf, chunk: DramChunk, parts: list[Part]) -> None:
        try:
            await shelf.write(chunk.key, [(part.header, part.held.view) for part in parts])
        finally:
            for part in parts:
                self._dram.give_back(part)

    async def settle(self) -> None:
        """Wait until nothing is written."""
        while self._writes:
            await asyncio.wait(self._writes)

    async def close(self, limit_s: float) -> None:
        """Nothing more is written. What has not ended within `limit_s` hangs in its tier, and is left behind."""
        self._closed = True
        if self._writes:
            await asyncio.wait(self._writes, timeout=limit_s)
