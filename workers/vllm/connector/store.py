"""The store as the connector sees it: the seam behind which `cache_store.client.StoreClient` stands.

No call waits. A future fails with StoreTimeout at its time limit and with StoreUnavailable when there is no connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from cache_store.chunk import Header
from cache_store.wire import Found, Loaded, Saved, Source


class LookupStore(Protocol):
    """Of the scheduler half."""

    def lookup(
        self, keys: bytes, world_size: int, sources: Sequence[Source] = (), *, limit_s: float = 1.0
    ) -> Future[Found]: ...

    def release(self, lease: int) -> None: ...

    def close(self) -> None: ...


class StagingSlot(Protocol):
    """Shared memory for one payload, the caller's from `take_slot` to `release`, but for the time of a request that
    names it."""

    @property
    def view(self) -> memoryview: ...

    def release(self) -> None: ...


class SlotStore(Protocol):
    """Of a worker half."""

    @property
    def alive(self) -> bool:
        """There is a connection."""
        ...

    def take_slot(self) -> Any:
        """A `StagingSlot`, or None when all are taken or there is no connection."""
        ...

    def load(self, key: bytes, slot: Any, limit_s: float) -> Future[Loaded]: ...

    def save(self, header: Header, slot: Any) -> Future[Saved]: ...

    def corrupt(self, key: bytes, tier: int) -> None: ...

    def close(self) -> None: ...
