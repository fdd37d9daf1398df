"""Chunk parts for tests of what stores them: told apart by a number, with content that follows from it."""

from __future__ import annotations

import random
from typing import NamedTuple

from cache_store.chunk import Header, checksum
from cache_store.chunk_path import part_path
from cache_store.events import ChunkKey

IDENTITY = bytes(range(32))


class Part(NamedTuple):
    header: Header
    payload: bytes

    @property
    def path(self) -> str:
        """Relative to a tier's root."""
        return str(part_path(self.header.identity, self.header.key, self.header.rank))

    @property
    def view(self) -> memoryview:
        return memoryview(self.payload)


def part_key(number: int) -> ChunkKey:
    return ChunkKey(random.Random(f"key {number}").randbytes(32))


def make_part(
    number: int,
    nbytes: int = 1000,
    *,
    rank: int = 0,
    world_size: int = 1,
    identity: bytes = IDENTITY,
    version: int = 0,
    created: float = 0.0,
) -> Part:
    """`version` varies the payload and nothing else."""
    payload = random.Random(f"payload {number} {rank} {version}").randbytes(nbytes)
    header = Header(
        key=part_key(number),
        parent=part_key(number - 1),
        identity=identity,
        rank=rank,
        world_size=world_size,
        tokens=256,
        dtype="float32",
        shape=(2, 1, nbytes // 2),
        nbytes=nbytes,
        checksum=checksum(payload),
        created=created or 1000.0 + number,
        tenant="a",
        cost_s=0.5,
    )
    return Part(header, payload)
