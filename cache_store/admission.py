"""Which chunks a tier takes in."""

from __future__ import annotations

from typing import Protocol

from cache_store.events import ChunkKey
from cache_store.recent_keys import RecentKeys


class Admission(Protocol):
    """Asked for each time a chunk is at hand: when it is saved, and when it is loaded from a faster tier."""

    def admit(self, key: ChunkKey) -> bool:
        """True when the tier should keep this chunk. The question counts: it may change the next answer."""


class Always:
    """Every chunk."""

    def admit(self, key: ChunkKey) -> bool:
        return True


class SecondTouch:
    """Chunks that come up again: three quarters of the chunks of a real trace come up once.

    A chunk comes up again when less than about `capacity` others came between.
    """

    def __init__(self, capacity: int = 2**20) -> None:
        self._seen = RecentKeys(capacity)

    def admit(self, key: ChunkKey) -> bool:
        return self._seen.add(key)


def admission_from(name: str) -> Admission:
    """By its name in a configuration. Raises KeyError for another name."""
    kinds: dict[str, type[Always] | type[SecondTouch]] = {"always": Always, "second_touch": SecondTouch}
    return kinds[name]()
