"""Stands at the connector's seams: a store in memory that answers when it is told to, and blocks that are bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from cache_store.chunk import Header
from cache_store.client import StoreUnavailable
from cache_store.events import KEY_BYTES
from cache_store.wire import ABSENT, DRAM, Found, Loaded, Saved, Source

DEADLINE_S = 10.0


def until(condition: Callable[[], Any]) -> Any:
    """What is not false, of a condition of plain data that another thread changes."""
    end = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)
    return found


@dataclass
class FakeSlot:
    store: FakeStore
    view: memoryview
    released: bool = False

    def release(self) -> None:
        assert not self.released
        self.released = True
        self.store.free += 1


@dataclass
class FakeStore:
    """Both sides' store. `held` keeps requests unanswered until `answer`."""

    slot_bytes: int = 64
    free: int = 4
    alive: bool = True
    held: bool = False
    tier: int = DRAM
    parts: dict[bytes, tuple[Header, bytes]] = field(default_factory=dict)
    waiting: list[tuple[Future[Any], Callable[[], Any]]] = field(default_factory=list)
    corrupted: list[bytes] = field(default_factory=list)
    leases: set[int] = field(default_factory=set)
    asked: list[bytes] = field(default_factory=list)
    next_lease: int = 1
    outcome: str = "stored"
    closed: bool = False

    def take_slot(self) -> FakeSlot | None:
        if not self.alive or not self.free:
            return None
        self.free -= 1
        return FakeSlot(self, memoryview(bytearray(self.slot_bytes)))

    def load(self, key: bytes, slot: FakeSlot, limit_s: float) -> Future[Loaded]:
        def answer() -> Loaded:
            if key not in self.parts:
                return Loaded(1, "missing")
            header, payload = self.parts[key]
            slot.view[: len(payload)] = payload
            return Loaded(1, "loaded", self.tier, header)

        return self._ask(answer)

    def save(self, header: Header, slot: FakeSlot) -> Future[Saved]:
        def answer() -> Saved:
            self.parts[header.key] = (header, bytes(slot.view[: header.nbytes]))
            return Saved(1, self.outcome)  # type: ignore[arg-type]

        return self._ask(answer)

    def lookup(
        self, keys: bytes, world_size: int, sources: Sequence[Source] = (), *, limit_s: float = 1.0
    ) -> Future[Found]:
        def answer() -> Found:
            self.asked = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
            lease, self.next_lease = self.next_lease, self.next_lease + 1
            self.leases.add(lease)
            tiers = bytes(self.tier if key in self.parts else ABSENT for key in self.asked)
            return Found(1, tiers, self.slot_bytes, lease)

        return self._ask(answer)

    def _ask(self, answer: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if not self.alive:
            future.set_exception(StoreUnavailable("no store"))
        elif self.held:
            self.waiting.append((future, answer))
        else:
            future.set_result(answer())
        return future

    def answer(self, count: int | None = None) -> None:
        for future, make in [
            self.waiting.pop(0) for _ in range(len(self.waiting) if count is None else count)
        ]:
            future.set_result(make())

    def vanish(self) -> None:
        self.alive = False
        waiting, self.waiting = self.waiting, []
        for future, _ in waiting:
            future.set_exception(StoreUnavailable("gone"))

    def corrupt(self, key: bytes, tier: int) -> None:
        self.corrupted.append(key)

    def release(self, lease: int) -> None:
        self.leases.remove(lease)

    def close(self) -> None:
        self.closed = True


class ByteBlocks:
    """Blocks of some bytes each. `gate` holds gathers up while it is not set."""

    def __init__(self, num_blocks: int, block_bytes: int, chunk_blocks: int) -> None:
        self.blocks = [bytearray(block_bytes) for _ in range(num_blocks)]
        self.block_bytes = block_bytes
        self.chunk_bytes = block_bytes * chunk_blocks
        self.shape = (chunk_blocks, 1, block_bytes)
        self.layout = "bytes/1"
        self.gate = threading.Event()
        self.gate.set()
        self.gathering = threading.Event()
        self.writes: list[int] = []

    def gather(self, blocks: Sequence[int], out: memoryview, fence: object = None) -> None:
        self.gathering.set()
        assert self.gate.wait(DEADLINE_S)
        for index, block in enumerate(blocks):
            out[index * self.block_bytes : (index + 1) * self.block_bytes] = self.blocks[block]

    def scatter(self, payload: memoryview, first: int, blocks: Sequence[int], fence: object = None) -> None:
        for index, block in enumerate(blocks, first):
            self.blocks[block][:] = payload[index * self.block_bytes : (index + 1) * self.block_bytes]
            self.writes.append(block)
