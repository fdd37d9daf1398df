"""Which chunks of a prompt a node can give, and bringing them closer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cache_store.dram import Dram
from cache_store.entries import MAX_WORLD_SIZE
from cache_store.events import KEY_BYTES, ChunkKey
from cache_store.moves import Moves
from cache_store.shelf import Shelf
from cache_store.wire import ABSENT, DISK, DRAM, PEER, REMOTE, Source
from cache_store.write_behind import WriteBehind

MAX_SOURCES = 256
"""Of a plan that are looked at."""
MOST_AHEAD = 1024
"""Chunks of a look-up that are moved ahead of their loads."""


class Run(NamedTuple):
    """Answer to a look-up, and what its moves need."""

    tiers: bytes
    """A code by position."""
    asked: list[ChunkKey]
    keys: list[ChunkKey]
    """Of the leading run that is somewhere."""
    nbytes: int
    """Of its largest chunk, as far as known."""
    nodes: Mapping[int, str]
    """Peers by position, by the plan."""
    world_size: int


class Lookups:
    """Belongs to the store's loop. Finding is all that an engine waits for; the rest comes after the answer."""

    def __init__(
        self,
        node: str,
        dram: Dram,
        shelves: Sequence[Shelf],
        moves: Moves,
        write_behind: WriteBehind,
    ) -> None:
        self._node = node
        self._dram = dram
        self._shelves = shelves
        self._moves = moves
        self._write_behind = write_behind
        self._begun: deque[Run] = deque()

    def find(self, keys: bytes, world_size: int, sources: Sequence[Source]) -> Run:
        """`keys` are concatenated. A chunk's tier is the fastest that has all its `world_size` parts: dram, disk,
        the peer that `sources` names, remote."""
        count = len(keys) // KEY_BYTES
        if not 0 < world_size <= MAX_WORLD_SIZE:
            return Run(bytes(count), [], [], 0, {}, world_size)
        names = [ChunkKey(keys[at : at + KEY_BYTES]) for at in range(0, count * KEY_BYTES, KEY_BYTES)]
        in_dram = self._dram.sizes_if_complete(names, world_size)
        on_disk, on_remote = (self._sizes(code, names, world_size) for code in (DISK, REMOTE))
        nodes = self._peers(sources, count)
        tiers, run, largest = bytearray(count), 0, 0
        for i in range(count):
            if nbytes := in_dram[i]:
                tiers[i] = DRAM
            elif nbytes := on_disk[i]:
                tiers[i] = DISK
            elif i in nodes:
                tiers[i] = PEER
            elif nbytes := on_remote[i]:
                tiers[i] = REMOTE
            else:
                continue
            if run == i:
                run += 1
                largest = max(largest, nbytes)
        return Run(bytes(tiers), names, names[:run], largest, nodes, world_size)

    def _sizes(self, code: int, names: Sequence[ChunkKey], world_size: int) -> Sequence[int]:
        for shelf in self._shelves:
            if shelf.code == code and shelf.entries and shelf.readable:
                return shelf.entries.sizes_if_complete(names, world_size)
        return bytes(len(names))

    def _peers(self, sources: Sequence[Source], count: int) -> dict[int, str]:
        nodes: dict[int, str] = {}
        for source in sources[:MAX_SOURCES]:
            if source.node != self._node:
                for i in range(max(source.first, 0), min(source.first + source.count, count)):
                    nodes.setdefault(i, source.node)
        return nodes

    def use(self, run: Run) -> None:
        """The leading run was asked for: soon it is worth more, and moves here."""
        if run.keys:
            self._begun.append(run)
            asyncio.get_running_loop().call_soon(self.catch_up)

    def catch_up(self) -> None:
        """Do what `use` left for later: before anything that counts on it."""
        while self._begun:
            run = self._begun.popleft()
            self._touch(run)
            self._bring_closer(run)

    def _touch(self, run: Run) -> None:
        # Backwards, so that a policy that lets go of the oldest lets go of a prompt's end before its beginning.
        for key in reversed(run.keys):
            chunk = self._dram.chunks.get(key)
            if chunk is not None:
                self._dram.touch(chunk)
            for shelf in self._shelves:
                shelf.touch(key)

    def _bring_closer(self, run: Run) -> None:
        by_node: dict[str, list[ChunkKey]] = {}
        for i, key in enumerate(run.keys[:MOST_AHEAD]):
            if run.tiers[i] == DRAM:
                chunk = self._dram.complete(key, run.world_size)
                if chunk is not None:
                    self._write_behind.touched(chunk)
            elif run.tiers[i] == PEER:
                by_node.setdefault(run.nodes[i], []).append(key)
            elif run.tiers[i] != ABSENT:
                self._moves.ahead(key, run.world_size)
        for node, keys in by_node.items():
            self._moves.from_peer(node, keys, run.world_size)
