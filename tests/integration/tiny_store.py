"""A store of a few lines behind a real socket, and parts to put into it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from cache_store.chunk import Header, checksum
from cache_store.events import ChunkKey
from cache_store.store_socket import SocketStats, Store, StoreServer
from cache_store.wire import (
    ABSENT,
    DRAM,
    WIRE_VERSION,
    Found,
    LoadOutcome,
    Lookup,
    Register,
    SaveOutcome,
)

T = TypeVar("T")

DEADLINE_S = 20.0
IDENTITY = b"i" * 32
SLOT_BYTES = 16 * 1024


def key_of(number: int) -> ChunkKey:
    return ChunkKey(hashlib.sha256(str(number).encode()).digest())


def payload_of(number: int, nbytes: int = SLOT_BYTES) -> bytes:
    return hashlib.shake_128(b"payload %d" % number).digest(nbytes)


def header_of(number: int, nbytes: int = SLOT_BYTES, **other: Any) -> Header:
    fields: dict[str, Any] = {
        "key": key_of(number),
        "parent": bytes(32),
        "identity": IDENTITY,
        "rank": 0,
        "world_size": 1,
        "tokens": 16,
        "dtype": "float32",
        "shape": (1, 1, nbytes),
        "nbytes": nbytes,
        "checksum": checksum(payload_of(number, nbytes)),
        "created": 1.0,
    }
    return Header(**{**fields, **other})


def worker(slots: int = 4, **other: Any) -> Register:
    fields: dict[str, Any] = {
        "version": WIRE_VERSION,
        "engine": "e",
        "identity": IDENTITY,
        "rank": 0,
        "slots": slots,
        "slot_bytes": SLOT_BYTES,
    }
    return Register(**{**fields, **other})


def scheduler() -> Register:
    return Register(WIRE_VERSION, "e", IDENTITY)


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.002)


class TinyStore:
    """Keeps parts in a dict. `pause` is awaited inside every load and save, before bytes move."""

    def __init__(self, numbers: range = range(0)) -> None:
        self.parts = {key_of(n): (header_of(n), payload_of(n)) for n in numbers}
        self.leases: set[int] = set()
        self.corrupted: list[ChunkKey] = []
        self.pause: Callable[[], Awaitable[None]] | None = None
        self._lease = itertools.count(1)

    def lookup(self, lookup: Lookup, /) -> Found:
        keys = [ChunkKey(lookup.keys[i : i + 32]) for i in range(0, len(lookup.keys), 32)]
        tiers = bytes(DRAM if key in self.parts else ABSENT for key in keys)
        lease = 0
        if tiers[:1] == bytes([DRAM]):
            lease = next(self._lease)
            self.leases.add(lease)
        return Found(lookup.id, tiers, SLOT_BYTES, lease)

    async def load_into(
        self, key: ChunkKey, rank: int, target: memoryview, limit_s: float, /
    ) -> tuple[LoadOutcome, int, Header | None]:
        if self.pause is not None:
            await self.pause()
        if key not in self.parts:
            return "missing", ABSENT, None
        header, payload = self.parts[key]
        target[: header.nbytes] = payload
        return "loaded", DRAM, header

    async def save(self, header: Header, payload: memoryview, /) -> SaveOutcome:
        if self.pause is not None:
            await self.pause()
        self.parts[ChunkKey(header.key)] = (header, bytes(payload))
        return "stored"

    def release(self, lease: int, /) -> None:
        self.leases.remove(lease)

    def corrupt(self, key: ChunkKey, tier: int, /) -> None:
        self.corrupted.append(key)


class ServerThread:
    """A store server on a loop of its own, in a thread."""

    def __init__(
        self,
        store: Callable[[], Store],
        path: Path,
        *,
        loop: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
        **options: Any,
    ) -> None:
        """`store` is made on the loop."""
        self._make_store = store
        self._path = path
        self._options = options
        self._loop = loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.server = self.run(self._start())

    async def _start(self) -> StoreServer:
        server = StoreServer(self._make_store(), self._path, node="node", **self._options)
        try:
            server.start()
        except BaseException:
            self._loop.call_soon(self._loop.stop)
            raise
        return server

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def call(self, function: Callable[[], T]) -> T:
        async def work() -> T:
            return function()

        return self.run(work())

    def stats(self) -> SocketStats:
        self.call(self.server.check_integrity)
        return self.call(self.server.stats)

    def close(self, drain_s: float = 5.0) -> None:
        if self._thread.is_alive():
            self.run(self.server.close(drain_s))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(DEADLINE_S)
            self._loop.close()
