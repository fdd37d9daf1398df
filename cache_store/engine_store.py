"""What engines ask of a store, as the socket that serves them sees it."""

from __future__ import annotations

from typing import Protocol

from cache_store.chunk import Header
from cache_store.events import ChunkKey
from cache_store.wire import Found, LoadOutcome, Lookup, SaveOutcome


class Store(Protocol):
    """What a server serves: `cache_store.node_store.NodeStore`. Called on the server's loop alone."""

    def lookup(self, lookup: Lookup, /) -> Found:
        """Answers at once."""
        ...

    async def load_into(
        self, key: ChunkKey, rank: int, target: memoryview, limit_s: float, /
    ) -> tuple[LoadOutcome, int, Header | None]:
        """Copy a part's payload to the start of `target`: outcome, tier and, when loaded, the header.

        Once this has returned or raised, also by cancellation, nothing touches `target` any more: its bytes may by
        then be those of another load. A `target` that is too short is `missing`.
        """
        ...

    async def save(self, header: Header, payload: memoryview, /) -> SaveOutcome:
        """Keep a copy of `payload`, which is read-only here and free to change once this has returned or raised."""
        ...

    def release(self, lease: int, /) -> None:
        """A lease that has run out is no error."""
        ...

    def corrupt(self, key: ChunkKey, tier: int, /) -> None: ...
