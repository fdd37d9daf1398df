"""The half of the connector that moves the bytes. One in every worker of the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cache_store.client import StoreClient
from cache_store.staging import StagingArea, rounded
from cache_store.wire import MAX_OPEN_REQUESTS, WIRE_VERSION, Register
from workers.vllm.connector.blocks import BlockCopier, page_lock, page_unlock
from workers.vllm.connector.copying import Origin
from workers.vllm.connector.metadata import StepReport, StepWork
from workers.vllm.connector.mover import Mover
from workers.vllm.connector.progress import Ended
from workers.vllm.connector.settings import Settings

logger = logging.getLogger(__name__)

_MIB = 1024 * 1024
_CONNECT_S = 2.0
"""The engine's start waits so long for the store at most; nothing does later."""


class WorkerHalf:
    """See vLLM's `KVConnectorBase_V1` for when each method is called. All of them on the worker's thread."""

    def __init__(self, settings: Settings, origin: Origin, num_blocks: int, block_tokens: int) -> None:
        self._settings = settings
        self._origin = origin
        self._num_blocks = num_blocks
        self._chunk_blocks = settings.chunk_tokens // block_tokens
        self._copier: BlockCopier | None = None
        self._store: StoreClient | None = None
        self._mover: Mover | None = None
        self._invalid: set[int] = set()
        self._report = StepReport()

    def register(self, caches: Mapping[str, Any]) -> None:
        """Take the engine's KV cache and connect to the store. Raises LayoutError, and ValueError for a staging area
        too small for a chunk."""
        copier = BlockCopier(caches, self._num_blocks, self._chunk_blocks)
        slots = min(self._settings.staging_mib * _MIB // rounded(copier.chunk_bytes), MAX_OPEN_REQUESTS)
        if slots < 2:
            raise ValueError(
                f"cache.staging_mib is {self._settings.staging_mib}; needed: {-(-2 * copier.chunk_bytes // _MIB)} at "
                f"least, for two chunks of {copier.chunk_bytes} bytes each"
            )
        register = Register(
            version=WIRE_VERSION,
            engine=self._settings.engine,
            identity=self._origin.identity,
            rank=self._origin.rank,
            world_size=self._origin.world_size,
            slots=slots,
            slot_bytes=copier.chunk_bytes,
        )
        prepare = _lock_pages if copier.on_gpu else None
        self._copier = copier
        self._store = StoreClient(Path(self._settings.socket), register, prepare=prepare)
        # Page-locking must not fall into the time when vLLM captures CUDA graphs, which comes next.
        if not self._store.wait_alive(_CONNECT_S):
            logger.warning("no store at %s yet; KV is shared once there is one", self._settings.socket)
        self._mover = Mover(
            copier,
            slots,
            self._store,
            self._origin,
            load_limit_s=self._settings.load_limit_s,
            hold_s=self._settings.hold_s,
        )
        self._mover.start()

    def start(self, work: StepWork) -> None:
        """Set off the step's work. Nothing of it is waited for."""
        assert self._mover is not None
        assert self._copier is not None
        if work.identity != self._origin.identity:
            raise RuntimeError(
                f"the scheduler's engine identity is {work.identity.hex()}, this worker's "
                f"{self._origin.identity.hex()}: they read different configurations"
            )
        if work.cancelled:
            self._mover.cancel(work.cancelled)
        if work.loads or work.saves:
            fence = self._copier.fence()
            self._mover.load(work.loads, fence)
            self._mover.save(work.saves, fence)
        if work.closing:
            self._mover.close_requests(work.closing)

    def preempt(self, work: StepWork) -> None:
        """Returns when the blocks of preempted requests are no longer read."""
        if work.preempted and self._mover is not None:
            self._mover.drop_saves(work.preempted)

    def ended(self) -> tuple[set[str], set[str]]:
        """Requests whose blocks are no longer read, and whose loads have ended, since the last call."""
        ended = self._mover.take() if self._mover is not None else Ended(set(), set(), set(), StepReport())
        self._invalid |= ended.invalid
        self._report = self._report.aggregate(ended.report)
        return ended.sent, ended.received

    def take_invalid(self) -> set[int]:
        """Blocks of ended loads that could not be filled."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> StepReport | None:
        report, self._report = self._report, StepReport()
        return report or None

    def close(self) -> None:
        """Safe to call twice."""
        if self._mover is not None:
            self._mover.close()
        if self._store is not None:
            self._store.close()


def _lock_pages(area: StagingArea) -> Callable[[], None]:
    if not page_lock(area.buffer):
        raise RuntimeError("the staging area could not be page-locked")
    return lambda: page_unlock(area.buffer)
