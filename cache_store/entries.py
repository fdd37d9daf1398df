"""The table of chunks that a file tier holds: made for a million of them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from cache_store.events import ChunkKey

MAX_WORLD_SIZE = 64


class Kind(NamedTuple):
    """What many chunks have in common."""

    identity: bytes
    world_size: int
    """0 where it is not known."""
    tenant: str


class Entry(NamedTuple):
    """What is known of a chunk without opening a file."""

    kind: Kind
    ranks: int
    """Bit r is set when the part of rank r is there."""
    nbytes: int
    """Bytes on the tier, all parts together."""
    part_bytes: int
    """Payload bytes of the largest part."""
    cost_s: float
    used: float

    @property
    def complete(self) -> bool:
        """Where the world size is not known: as far as can be seen."""
        return _is_complete(self.ranks, self.kind.world_size)


class Entries:
    """Chunks by key. An entry is a slot in arrays of numbers: some 120 bytes with its place in the dict of keys.

    Whoever keeps keys of entries for long should keep the object that `add` returns.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._slots: dict[ChunkKey, int] = {}
        self._keys: list[ChunkKey | None] = []
        self._free = array("I")
        self._kinds: list[Kind] = []
        self._kind_numbers: dict[Kind, int] = {}
        self._kind = array("I")
        self._ranks = array("Q")
        self._nbytes = array("Q")
        self._part_bytes = array("Q")
        self._cost_s = array("f")
        self._used = array("d")

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._slots

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._slots)

    def get(self, key: ChunkKey) -> Entry | None:
        slot = self._slots.get(key)
        return None if slot is None else self._entry(slot)

    def _entry(self, slot: int) -> Entry:
        return Entry(
            self._kinds[self._kind[slot]],
            self._ranks[slot],
            self._nbytes[slot],
            self._part_bytes[slot],
            self._cost_s[slot],
            self._used[slot],
        )

    def is_complete(self, key: ChunkKey) -> bool:
        slot = self._slots.get(key)
        return slot is not None and _is_complete(self._ranks[slot], self._kinds[self._kind[slot]].world_size)

    def sizes_if_complete(self, keys: Iterable[ChunkKey], world_size: int) -> list[int]:
        """Bytes of each chunk; 0 where it is not there with the parts of exactly `world_size` ranks."""
        slots, ranks, nbytes, everyone = self._slots, self._ranks, self._nbytes, _all_ranks(world_size)
        return [
            nbytes[slot] if (slot := slots.get(key)) is not None and ranks[slot] == everyone else 0
            for key in keys
        ]

    def add(
        self, key: ChunkKey, rank: int, kind: Kind, nbytes: int, payload_bytes: int, cost_s: float, now: float
    ) -> bool:
        """Note a part. Whether the chunk is complete with it and was not before.

        Raises ValueError for a rank or world size out of range, or that contradicts the entry's other parts.
        """
        if not 0 <= kind.world_size <= MAX_WORLD_SIZE or not 0 <= rank < (kind.world_size or MAX_WORLD_SIZE):
            raise ValueError(f"rank {rank} of {kind.world_size}; at most {MAX_WORLD_SIZE} ranks are possible")
        slot, bit = self._slots.get(key), 1 << rank
        if slot is None:
            slot = self._new_slot(key)
            self._kind[slot] = self._number_of(kind)
        before = self._ranks[slot]
        if before & bit:
            return False
        known = self._kinds[self._kind[slot]]
        if (known.identity, known.world_size) != (kind.identity, kind.world_size):
            raise ValueError("the parts of one chunk are of one engine identity and one world size")
        self._ranks[slot] = before | bit
        self._nbytes[slot] += nbytes
        self._part_bytes[slot] = max(self._part_bytes[slot], payload_bytes)
        self._cost_s[slot] = max(self._cost_s[slot], cost_s)
        self._used[slot] = now
        self.bytes += nbytes
        return _is_complete(before | bit, kind.world_size) and not _is_complete(before, kind.world_size)

    def _new_slot(self, key: ChunkKey) -> int:
        if self._free:
            slot = self._free.pop()
            self._keys[slot] = key
        else:
            slot = len(self._keys)
            self._keys.append(key)
            for column in (self._kind, self._ranks, self._nbytes, self._part_bytes, self._cost_s, self._used):
                column.append(0)
        self._slots[key] = slot
        return slot

    def _number_of(self, kind: Kind) -> int:
        number = self._kind_numbers.setdefault(kind, len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append(kind)
        return number

    def remove(self, key: ChunkKey) -> Entry | None:
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        entry = self._entry(slot)
        self.bytes -= entry.nbytes
        for column in (self._kind, self._ranks, self._nbytes, self._part_bytes, self._cost_s, self._used):
            column[slot] = 0
        self._keys[slot] = None
        self._used[slot] = math.inf
        self._free.append(slot)
        return entry

    def touch(self, key: ChunkKey, now: float) -> bool:
        """Whether it is there."""
        slot = self._slots.get(key)
        if slot is None:
            return False
        self._used[slot] = now
        return True

    def unused_since(self, moment: float) -> list[ChunkKey]:
        """Not those of free slots, whose last use is never."""
        used = np.frombuffer(self._used, np.float64)
        return [key for slot in np.flatnonzero(used < moment) if (key := self._keys[slot]) is not None]

    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself."""
        assert sorted([*self._slots.values(), *self._free]) == list(range(len(self._ranks)))
        assert all(self._keys[slot] == key for key, slot in self._slots.items())
        assert all(self._keys[slot] is None and self._ranks[slot] == 0 for slot in self._free)
        assert self.bytes == sum(self._nbytes) == sum(self._nbytes[slot] for slot in self._slots.values())
        assert len(self._kinds) == len(self._kind_numbers)
        for key in self._slots:
            entry = self.get(key)
            assert entry is not None
            assert 0 < entry.ranks <= _all_ranks(entry.kind.world_size or MAX_WORLD_SIZE)
            assert entry.part_bytes <= entry.nbytes


def _is_complete(ranks: int, world_size: int) -> bool:
    if world_size:
        return ranks == _all_ranks(world_size)
    return ranks > 0 and ranks & (ranks + 1) == 0


def _all_ranks(world_size: int) -> int:
    return (1 << world_size) - 1
