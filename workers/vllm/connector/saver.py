"""Chunks on their way from the engine's blocks to the store."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable

from cache_store.chunk import Header, checksum
from cache_store.events import ChunkKey
from cache_store.wire import Saved
from workers.vllm.connector.copying import Blocks, Origin, answer_of
from workers.vllm.connector.metadata import Failure, RequestId, SaveWork
from workers.vllm.connector.progress import Progress
from workers.vllm.connector.store import SlotStore, StagingSlot

logger = logging.getLogger(__name__)

_MAX_WAITING = 4096


class Saver:
    """Belongs to the mover's thread. A save is over for the engine once its blocks were read."""

    def __init__(
        self,
        blocks: Blocks,
        store: SlotStore,
        origin: Origin,
        progress: Progress,
        post: Callable[[Callable[[], None]], None],
        slots: int,
        hold_s: float,
    ) -> None:
        """`post` has something done in the mover's thread; `slots` may be taken at once."""
        self._blocks = blocks
        self._store = store
        self._origin = origin
        self._progress = progress
        self._post = post
        self._slots = slots
        self._hold_s = hold_s
        self._saves: deque[tuple[SaveWork, object]] = deque()
        self._waiting: dict[RequestId, int] = {}
        """Saves by request that were not gathered yet."""
        self._closing: dict[RequestId, float] = {}
        """Until when the blocks of closing requests wait for a slot."""
        self.starved = False
        """A save waits for a slot that it may take."""

    @property
    def ready(self) -> bool:
        """A save may be gathered now."""
        return bool(self._saves and self._slots and not self.starved)

    def deadlines(self) -> Iterable[float]:
        return self._closing.values()

    def add(self, save: SaveWork, fence: object) -> None:
        if len(self._saves) >= _MAX_WAITING or not self._store.alive:
            self._progress.gathered(save.request)
            self._progress.saved(save.key, "dropped")
            return
        self._saves.append((save, fence))
        self._waiting[save.request] = self._waiting.get(save.request, 0) + 1

    def drop(self, requests: Collection[RequestId]) -> None:
        """Saves of these that have not begun."""
        dropped = [save for save, _ in self._saves if save.request in requests]
        self._saves = deque(item for item in self._saves if item[0].request not in requests)
        for save in dropped:
            self._progress.saved(save.key, "dropped")
            self._read(save.request)

    def close(self, request: RequestId, now: float) -> None:
        """The request is named as sent when no save waits to read its blocks."""
        if request in self._waiting:
            self._closing[request] = now + self._hold_s
        else:
            self._progress.sent(request)

    def give_up_late(self, now: float) -> None:
        late = [request for request, until in self._closing.items() if now >= until]
        if late:
            self.drop(late)

    def gather_next(self) -> None:
        self.starved = False
        if not self._saves or not self._slots:
            return
        slot = self._store.take_slot()
        if slot is None:
            self.starved = True
            if not self._store.alive:
                self.drop(set(self._waiting))
            return
        save, fence = self._saves.popleft()
        try:
            header = self._gather(save, slot.view, fence)
        except Exception:
            logger.exception("a chunk could not be read from the engine's blocks")
            slot.release()
            self._progress.saved(save.key, "dropped")
            self._read(save.request)
            return
        self._slots -= 1
        self._read(save.request)
        try:
            future = self._store.save(header, slot)
        except Exception:
            logger.exception("a save could not be asked for")
            self._saved(save.key, slot, "unavailable")
            return
        future.add_done_callback(
            lambda done: self._post(lambda: self._saved(save.key, slot, answer_of(done)))
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when the structures contradict themselves."""
        assert self._slots >= 0
        assert sum(self._waiting.values()) == len(self._saves)
        assert all(self._waiting.values())
        assert self._closing.keys() <= self._waiting.keys()

    def _gather(self, save: SaveWork, view: memoryview, fence: object) -> Header:
        payload = view[: self._blocks.chunk_bytes]
        self._blocks.gather(save.blocks, payload, fence)
        return Header(
            key=save.key,
            parent=save.parent,
            identity=self._origin.identity,
            rank=self._origin.rank,
            world_size=self._origin.world_size,
            tokens=self._origin.chunk_tokens,
            dtype=self._blocks.layout,
            shape=self._blocks.shape,
            nbytes=payload.nbytes,
            checksum=checksum(payload),
            created=time.time(),
            tenant=save.tenant,
            cost_s=save.cost_s,
        )

    def _read(self, request: RequestId) -> None:
        """A save that waited reads the request's blocks no longer."""
        self._progress.gathered(request)
        self._waiting[request] -= 1
        if not self._waiting[request]:
            del self._waiting[request]
            if self._closing.pop(request, None) is not None:
                self._progress.sent(request)

    def _saved(self, key: ChunkKey, slot: StagingSlot, answer: Saved | Failure) -> None:
        slot.release()
        self._slots += 1
        self._progress.saved(key, "dropped" if isinstance(answer, str) else answer.outcome)
