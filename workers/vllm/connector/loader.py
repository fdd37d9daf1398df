"""Chunks on their way from the store into the engine's blocks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cache_store.chunk import ChunkError, verify
from cache_store.wire import Loaded
from workers.vllm.connector.copying import Blocks, Origin, answer_of
from workers.vllm.connector.metadata import Failure, LoadWork, RequestId
from workers.vllm.connector.progress import Progress
from workers.vllm.connector.store import SlotStore, StagingSlot

logger = logging.getLogger(__name__)


@dataclass
class Load:
    work: LoadWork
    fence: object
    deadline: float
    tiers: list[int | None]
    """Of the pieces that were written."""
    issued: int = 0
    failed_at: int | None = None
    failure: Failure = ""

    @property
    def wanted(self) -> int:
        """Pieces that still count: those before the first that failed."""
        return len(self.work.pieces) if self.failed_at is None else self.failed_at

    def fail(self, piece: int, failure: Failure) -> None:
        if piece < self.wanted:
            self.failed_at, self.failure = piece, failure


class Arrival(NamedTuple):
    load: Load
    piece: int
    slot: StagingSlot
    answer: Loaded | Failure


class Loader:
    """Belongs to the mover's thread. Every load ends once, by its time limit at the latest."""

    def __init__(
        self,
        blocks: Blocks,
        store: SlotStore,
        origin: Origin,
        progress: Progress,
        post: Callable[[Callable[[], None]], None],
        limit_s: float,
    ) -> None:
        """`post` has something done in the mover's thread."""
        self._blocks = blocks
        self._store = store
        self._origin = origin
        self._progress = progress
        self._post = post
        self._limit_s = limit_s
        self._loads: dict[RequestId, Load] = {}
        self._arrivals: deque[Arrival] = deque()
        self.starved = False
        """A piece waits for a slot."""

    @property
    def has_arrivals(self) -> bool:
        return bool(self._arrivals)

    def deadlines(self) -> Iterator[float]:
        return (load.deadline for load in self._loads.values())

    def add(self, work: LoadWork, fence: object, now: float) -> None:
        self._loads[work.request] = Load(work, fence, now + self._limit_s, [None] * len(work.pieces))

    def cancel(self, request: RequestId) -> None:
        load = self._loads.get(request)
        if load is not None:
            load.fail(0, "cancelled")

    def go_on(self, now: float) -> None:
        """Ask for what there are slots for, and end what is done or late."""
        self.starved = False
        for load in list(self._loads.values()):
            if now >= load.deadline:
                load.fail(load.tiers.index(None), "late")
            while load.issued < load.wanted and not self.starved:
                self._issue(load, now)
            self._end_if_done(load)

    def take_arrival(self) -> None:
        load, piece, slot, answer = self._arrivals.popleft()
        try:
            if piece < load.wanted:
                failure = answer if isinstance(answer, str) else self._write(load, piece, slot.view, answer)
                if failure:
                    load.fail(piece, failure)
        except Exception:
            logger.exception("a chunk could not be written to the engine's blocks")
            load.fail(piece, "copy")
        finally:
            slot.release()

    def _issue(self, load: Load, now: float) -> None:
        piece, slot = load.issued, self._store.take_slot()
        if slot is None:
            self.starved = True
            if not self._store.alive:
                load.fail(piece, "unavailable")
            return
        load.issued += 1
        try:
            future = self._store.load(load.work.pieces[piece].key, slot, max(load.deadline - now, 0.001))
        except Exception:
            logger.exception("a load could not be asked for")
            self._arrivals.append(Arrival(load, piece, slot, "unavailable"))
            return
        future.add_done_callback(
            lambda done: self._post(
                lambda: self._arrivals.append(Arrival(load, piece, slot, answer_of(done)))
            )
        )

    def _write(self, load: Load, index: int, view: memoryview, answer: Loaded) -> Failure:
        """Verify what came and write it to its blocks; why not, or empty."""
        if answer.outcome != "loaded" or answer.header is None:
            return answer.outcome
        piece, header = load.work.pieces[index], answer.header
        payload = view[: header.nbytes]
        try:
            verify(
                header,
                payload,
                key=piece.key,
                identity=self._origin.identity,
                rank=self._origin.rank,
                world_size=self._origin.world_size,
            )
        except ChunkError as error:
            logger.warning("a chunk from the store is not used: %s", error)
            self._store.corrupt(piece.key, answer.tier)
            return error.fault
        blocks = self._blocks
        if (header.dtype, header.shape, header.nbytes) != (blocks.layout, blocks.shape, blocks.chunk_bytes):
            return "layout"
        blocks.scatter(payload, piece.first, piece.blocks, load.fence)
        load.tiers[index] = answer.tier
        return ""

    def _end_if_done(self, load: Load) -> None:
        """A load ends when every piece that counts was written. Slots of others come back later, to no load."""
        tiers = tuple(tier for tier in load.tiers[: load.wanted] if tier is not None)
        if len(tiers) == load.wanted:
            del self._loads[load.work.request]
            self._progress.load_ended(load.work, tiers, load.failure, self._blocks.chunk_bytes)
