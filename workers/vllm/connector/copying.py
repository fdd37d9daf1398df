"""What loading and saving have in common: the engine's blocks, and who this worker is."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol, TypeVar

from cache_store.client import StoreTimeout
from cache_store.wire import Loaded, Saved
from workers.vllm.connector.metadata import Failure

A = TypeVar("A", Loaded, Saved)


class Blocks(Protocol):
    """What is needed of `workers.vllm.connector.blocks.BlockCopier`."""

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def layout(self) -> str: ...

    def gather(self, blocks: Sequence[int], out: memoryview, fence: object = None) -> None: ...

    def scatter(
        self, payload: memoryview, first: int, blocks: Sequence[int], fence: object = None
    ) -> None: ...


class Origin(NamedTuple):
    """What every part that this worker saves, and may load, has in common."""

    identity: bytes
    rank: int
    world_size: int
    chunk_tokens: int


def answer_of(future: Future[A]) -> A | Failure:
    """The answer, or why there is none."""
    error = future.exception()
    if error is None:
        return future.result()
    return "late" if isinstance(error, StoreTimeout) else "unavailable"
