"""What the mover's thread has ended, until the engine's thread takes it away."""

from __future__ import annotations

from threading import Lock
from typing import NamedTuple

from cache_store.events import ChunkKey
from cache_store.wire import SaveOutcome
from workers.vllm.connector.metadata import LoadResult, LoadWork, RequestId, StepReport


class Ended(NamedTuple):
    """What ended since it was last taken."""

    received: set[RequestId]
    """Loads that no longer write to blocks."""
    sent: set[RequestId]
    """Closing requests whose blocks are no longer read."""
    invalid: set[int]
    """Blocks that could not be filled."""
    report: StepReport


class Progress:
    """Every method is one step: a load that has ended is never told without the blocks that it could not fill."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ended = _nothing()

    def take(self) -> Ended:
        with self._lock:
            ended, self._ended = self._ended, _nothing()
        return ended

    def load_ended(self, work: LoadWork, tiers: tuple[int, ...], failure: str, piece_bytes: int) -> None:
        """`tiers` of the leading pieces that were written, of `piece_bytes` each; `failure` of the one behind them.

        A piece behind one that failed is computed, and counts for nothing even where it was written.
        """
        with self._lock:
            self._ended.received.add(work.request)
            loaded = self._ended.report.loaded_bytes
            for tier in tiers:
                loaded[tier] = loaded.get(tier, 0) + piece_bytes
            for piece in work.pieces[len(tiers) :]:
                self._ended.invalid.update(piece.blocks)
            self._ended.report.loads.append(LoadResult(work.request, tiers, failure))

    def gathered(self, request: RequestId) -> None:
        """One save of the request reads its blocks no longer."""
        with self._lock:
            gathered = self._ended.report.gathered
            gathered[request] = gathered.get(request, 0) + 1

    def saved(self, key: ChunkKey, outcome: SaveOutcome) -> None:
        with self._lock:
            self._ended.report.saved.append((key, outcome))

    def sent(self, request: RequestId) -> None:
        with self._lock:
            self._ended.sent.add(request)


def _nothing() -> Ended:
    return Ended(set(), set(), set(), StepReport())
