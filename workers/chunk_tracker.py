"""From an engine's blocks to the cluster's chunks: which chunks does the engine hold?

Blocks form a forest by their parents. A chunk is a run of `chunk_tokens / block_tokens` blocks of it and is
present when all of them are. Chunks that diverge inside share their leading blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cache_store.events import ChunkKey
from cache_store.keys import TOKEN_BYTES, namespace, next_key, token_bytes
from workers.kv_events import BlockHash, BlocksRemoved, BlocksStored, KVEvent


class ChunkChanges(NamedTuple):
    """What changed: `cleared` came first, no key is in both lists, and every key is in its list once."""

    added: list[ChunkKey]
    removed: list[ChunkKey]
    cleared: bool


@dataclass(slots=True, eq=False)
class _Block:
    """A block that is present, or one of the leading blocks of a chunk of which a later block is."""

    hash: BlockHash
    parent: _Block | None
    """The block before, inside the same chunk; None for a chunk's first block."""
    position: int
    """In its chunk."""
    previous: bytes
    """Key of the chunk before, or the namespace."""
    tokens: bytes
    key: ChunkKey | None = None
    """Of the chunk that ends with this block."""
    copies: int = 0
    """Physical blocks with this content in the engine, as far as known; never more than there are."""
    whole: bool = False
    """This block and all before it in its chunk are present."""
    children: dict[BlockHash, _Block] = field(default_factory=dict)
    """Blocks after it, inside the same chunk."""


class ChunkTracker:
    """Follows the KV events of one engine.

    It may report less than the engine holds, never more. What it relies on:

    - Equal ids mean equal content, in one engine.
    - A store with a parent is one more physical copy of its blocks: vLLM caches the blocks that a request
      computed even where equal ones are cached, and says the removal of each copy. A store at the start of a
      sequence may also repeat blocks that were cached before (vLLM: `kv_cache_report_mode: full`), so it
      never counts as a second copy, and the first removal ends the block.
    - What follows a block that was never seen, or is gone with all that followed it in its chunk, has no
      known content and is ignored.
    """

    def __init__(self, identity_digest: bytes, block_tokens: int, chunk_tokens: int) -> None:
        if chunk_tokens % block_tokens:
            raise ValueError(f"chunk_tokens is {chunk_tokens}; needed: a multiple of {block_tokens}")
        self._identity = identity_digest
        self._block_tokens = block_tokens
        self._blocks_per_chunk = chunk_tokens // block_tokens
        self._blocks: dict[BlockHash, _Block] = {}
        self._unshareable: set[BlockHash] = set()
        self._chunks: dict[ChunkKey, int] = {}
        """Present chunks, and how many last blocks stand for each: more than one where the engine tells apart
        what we don't, such as two paths of one adapter."""
        self.unknown_parents = 0
        """Store events that were ignored because nothing is known of their parent."""
        self.malformed = 0
        """Store events that were ignored because blocks and tokens don't fit."""

    @property
    def chunks(self) -> frozenset[ChunkKey]:
        """All chunks that are present."""
        return frozenset(self._chunks)

    @property
    def blocks(self) -> int:
        """Blocks in memory: those present, and absent ones that a present block's chunk needs."""
        return len(self._blocks)

    def apply(self, events: Sequence[KVEvent]) -> ChunkChanges:
        """Take events in the order in which the engine made them."""
        changes = _Changes()
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(event, changes)
            elif isinstance(event, BlocksRemoved):
                for block_hash in event.hashes:
                    self._remove(block_hash, changes)
            else:
                self._clear(changes)
        return changes.result()

    def _store(self, event: BlocksStored, changes: _Changes) -> None:
        tokens = self._tokens_of(event)
        if tokens is None:
            self.malformed += 1
            return
        shareable = len(event.hashes) if event.shareable is None else event.shareable
        if event.parent is not None and event.parent in self._unshareable:
            shareable = 0
        self._unshareable.update(event.hashes[shareable:])
        size = self._block_tokens * TOKEN_BYTES
        before = self._blocks.get(event.parent) if event.parent is not None else None
        for i, block_hash in enumerate(event.hashes[:shareable]):
            block = self._blocks.get(block_hash)
            if block is None:
                if before is None and (i > 0 or event.parent is not None):
                    self.unknown_parents += 1
                    return
                root = namespace(self._identity, event.adapter, event.salt) if before is None else b""
                block = self._create(block_hash, before, root, bytes(tokens[i * size : (i + 1) * size]))
            block.copies = block.copies + 1 if event.parent is not None else max(block.copies, 1)
            self._update(block, changes)
            before = block

    def _tokens_of(self, event: BlocksStored) -> bytes | memoryview | None:
        """None for an event whose blocks and tokens don't fit each other or this engine."""
        if event.block_tokens != self._block_tokens:
            return None
        try:
            tokens = token_bytes(event.tokens)
        except ValueError:
            return None
        return tokens if len(tokens) == len(event.hashes) * self._block_tokens * TOKEN_BYTES else None

    def _create(self, block_hash: BlockHash, before: _Block | None, root: bytes, tokens: bytes) -> _Block:
        if before is None:
            block = _Block(block_hash, None, 0, root, tokens)
        elif before.key is not None:
            block = _Block(block_hash, None, 0, before.key, tokens)
        else:
            block = _Block(block_hash, before, before.position + 1, before.previous, tokens)
            before.children[block_hash] = block
        if block.position == self._blocks_per_chunk - 1:
            block.key = next_key(block.previous, _chunk_tokens(block))
        self._blocks[block_hash] = block
        return block

    def _remove(self, block_hash: BlockHash, changes: _Changes) -> None:
        self._unshareable.discard(block_hash)
        block = self._blocks.get(block_hash)
        if block is None or block.copies == 0:
            return
        block.copies -= 1
        self._update(block, changes)
        self._forget(block)

    def _forget(self, block: _Block | None) -> None:
        """Drop a block, and those before it in its chunk, that nothing present needs."""
        while block is not None and block.copies == 0 and not block.children:
            del self._blocks[block.hash]
            if block.parent is not None:
                del block.parent.children[block.hash]
            block = block.parent

    def _update(self, block: _Block, changes: _Changes) -> None:
        """Bring `whole` up to date in a block and those after it, and note the chunks that this changes."""
        stack = [block]
        while stack:
            block = stack.pop()
            whole = block.copies > 0 and (block.parent is None or block.parent.whole)
            if whole == block.whole:
                continue
            block.whole = whole
            stack.extend(block.children.values())
            if block.key is not None:
                self._count(block.key, whole, changes)

    def _count(self, key: ChunkKey, present: bool, changes: _Changes) -> None:
        count = self._chunks.get(key, 0) + (1 if present else -1)
        if count:
            self._chunks[key] = count
        else:
            del self._chunks[key]
        if count == 1 and present:
            changes.add(key)
        elif count == 0:
            changes.remove(key)

    def _clear(self, changes: _Changes) -> None:
        self._blocks.clear()
        self._unshareable.clear()
        self._chunks.clear()
        changes.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself."""
        chunks: dict[ChunkKey, int] = {}
        for block_hash, block in self._blocks.items():
            assert block.hash == block_hash
            assert block.copies >= 0
            assert block.copies > 0 or block.children, f"{block_hash!r} is gone and needed by nothing"
            assert block.whole == (block.copies > 0 and (block.parent is None or block.parent.whole))
            assert (block.position == 0) == (block.parent is None)
            assert (block.key is not None) == (block.position == self._blocks_per_chunk - 1)
            if block.parent is not None:
                assert block.parent.position == block.position - 1
                assert block.parent.children[block_hash] is block
                assert self._blocks[block.parent.hash] is block.parent
            for child_hash, child in block.children.items():
                assert self._blocks[child_hash] is child
                assert child.parent is block
            if block.key is not None:
                assert not block.children
                assert block.key == next_key(block.previous, _chunk_tokens(block))
                if block.whole:
                    chunks[block.key] = chunks.get(block.key, 0) + 1
        assert chunks == self._chunks, "present chunks are not those whose blocks are all present"


class _Changes:
    """Nets changes of chunks over a batch of events."""

    def __init__(self) -> None:
        self._added: dict[ChunkKey, None] = {}
        self._removed: dict[ChunkKey, None] = {}
        self._cleared = False

    def add(self, key: ChunkKey) -> None:
        if key in self._removed:
            del self._removed[key]
        else:
            self._added[key] = None

    def remove(self, key: ChunkKey) -> None:
        if key in self._added:
            del self._added[key]
        else:
            self._removed[key] = None

    def clear(self) -> None:
        self._added.clear()
        self._removed.clear()
        self._cleared = True

    def result(self) -> ChunkChanges:
        return ChunkChanges(list(self._added), list(self._removed), self._cleared)


def _chunk_tokens(last: _Block) -> bytes:
    """Tokens of the chunk that ends with `last`."""
    parts = []
    block: _Block | None = last
    while block is not None:
        parts.append(block.tokens)
        block = block.parent
    return b"".join(reversed(parts))
