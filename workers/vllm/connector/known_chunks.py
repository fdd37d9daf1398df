"""Chunks that an engine believes to be in the cluster."""

from __future__ import annotations

from collections.abc import Iterable

from cache_store.events import ChunkKey


class KnownChunks:
    """The last so many keys that were found there or saved. Too many cost a save, too few cost a copy."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._keys: dict[ChunkKey, None] = {}

    def add(self, key: ChunkKey) -> None:
        self._keys.pop(key, None)
        self._keys[key] = None
        if len(self._keys) > self._capacity:
            del self._keys[next(iter(self._keys))]

    def discard(self, key: ChunkKey) -> None:
        self._keys.pop(key, None)

    def note(self, keys: Iterable[ChunkKey], tiers: bytes) -> None:
        """What a look-up found: a tier for each key, 0 for none."""
        for key, tier in zip(keys, tiers, strict=True):
            if tier:
                self.add(key)
            else:
                self.discard(key)

    def clear(self) -> None:
        self._keys.clear()

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)
