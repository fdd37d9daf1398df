"""What an engine says about its own KV blocks, in our words; every engine adapter translates into these."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

BlockHash = Hashable
"""The engine's id of a block: opaque. Equal content gives an equal id inside one engine, and nowhere else."""


@dataclass(frozen=True)
class BlocksStored:
    """Consecutive full blocks of one sequence entered the engine's cache."""

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    """Block before the first one; None at the start of a sequence."""
    tokens: Sequence[int]
    """Token ids of all blocks, concatenated: len(hashes) * block_tokens."""
    block_tokens: int
    adapter: str = ""
    """Engine's name of the LoRA adapter, `name@contenthash`; empty for the base model."""
    salt: str = ""
    """Cache salt of the sequence. Only read where `parent` is None; later blocks inherit it."""
    shareable: int | None = None
    """How many of the leading blocks hold KV that the tokens alone determine; None for all of them.
    Everything after the first other block (an image, prompt embeddings) is not shareable either."""


@dataclass(frozen=True)
class BlocksRemoved:
    """Blocks left the engine's cache."""

    hashes: Sequence[BlockHash]


@dataclass(frozen=True)
class BlocksCleared:
    """The engine's cache is empty."""


KVEvent = BlocksStored | BlocksRemoved | BlocksCleared
KVEventSink = Callable[[Sequence[KVEvent]], None]
"""Takes events in the order in which the engine made them, on the replica's event loop."""
