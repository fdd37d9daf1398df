"""The simulated engine's paged prefix cache.

Blocks have no contents here: the cache knows which block ids are present, who holds them, and which go first
when room is needed. An id chains the block's tokens to everything before them, down to salt and LoRA adapter.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KVEvent

BlockId = bytes


@dataclass
class Content:
    """What the KV of one sequence depends on. Tokens are appended while it generates."""

    tokens: array[int]
    salt: str = ""
    adapter: str = ""
    shareable: int | None = None
    """Leading tokens whose KV the tokens alone determine; None for all."""
    media: tuple[tuple[int, bytes], ...] = ()
    """Images and sounds: token position and digest of each."""
    chain: list[BlockId] = field(default_factory=list)
    """Ids of the leading full blocks, as far as they were asked for."""

    def extend_chain(self, n_tokens: int, block_tokens: int) -> None:
        """Make `chain` hold the ids of all full blocks of the first `n_tokens`."""
        parent = self.chain[-1] if self.chain else self._root()
        for start in range(len(self.chain) * block_tokens, n_tokens - block_tokens + 1, block_tokens):
            end = start + block_tokens
            extra = b"".join(digest for position, digest in self.media if start <= position < end)
            block = self.tokens[start:end].tobytes()
            parent = hashlib.blake2b(parent + block + extra, digest_size=16).digest()
            self.chain.append(parent)

    def _root(self) -> bytes:
        salt, adapter = self.salt.encode(), self.adapter.encode()
        return hashlib.blake2b(len(salt).to_bytes(8, "little") + salt + adapter, digest_size=16).digest()


@dataclass
class Lease:
    """The blocks that one sequence holds."""

    held: list[BlockId]
    """Cached blocks, from the start of the sequence."""
    private: int
    """Blocks behind them that are not in the cache yet."""

    @property
    def blocks(self) -> int:
        return len(self.held) + self.private


class BlockCache:
    """`capacity` blocks of `block_tokens` tokens.

    Of every sequence a leading run of blocks is cached, so a block is only ever present together with all
    blocks before it: releasing puts the last block first in the line for eviction.
    """

    def __init__(self, capacity: int, block_tokens: int) -> None:
        self.capacity = capacity
        self.block_tokens = block_tokens
        self._holders: dict[BlockId, int] = {}
        self._parents: dict[BlockId, BlockId | None] = {}
        self._idle: OrderedDict[BlockId, None] = OrderedDict()
        self._private = 0
        self._events: list[KVEvent] = []

    def match(self, chain: Sequence[BlockId]) -> int:
        """How many leading blocks of `chain` are present."""
        for index, block in enumerate(chain):
            if block not in self._holders:
                return index
        return len(chain)

    def acquire(self, content: Content, blocks: int) -> Lease | None:
        """Room for the `blocks` that the sequence's tokens need; None, and no change, where that is lacking.

        Takes what is cached, except that the last token is always left to compute: its block is never a hit.
        """
        usable = (len(content.tokens) - 1) // self.block_tokens
        content.extend_chain(usable * self.block_tokens, self.block_tokens)
        held = content.chain[: min(self.match(content.chain), usable)]
        unheld = sum(1 for block in held if block in self._idle)
        private = blocks - len(held)
        if private > self._free + len(self._idle) - unheld:
            return None
        for block in held:
            self._hold(block)
        self._make_room(private)
        self._private += private
        return Lease(list(held), private)

    def grow(self, lease: Lease) -> bool:
        """One more block; False, and no change, where every block is held."""
        if self._free + len(self._idle) < 1:
            return False
        self._make_room(1)
        self._private += 1
        lease.private += 1
        return True

    def store(self, lease: Lease, content: Content, n_tokens: int) -> None:
        """The KV of the first `n_tokens` is computed: put their full blocks in the cache."""
        content.extend_chain(n_tokens, self.block_tokens)
        stored: list[BlockId] = []
        for block in content.chain[len(lease.held) : n_tokens // self.block_tokens]:
            if block in self._holders:
                self._hold(block)
            else:
                self._holders[block] = 1
                self._parents[block] = lease.held[-1] if lease.held else None
                stored.append(block)
            lease.held.append(block)
            lease.private -= 1
            self._private -= 1
        if stored:
            self._events.append(self._stored(content, stored, len(lease.held) - len(stored)))

    def release(self, lease: Lease) -> None:
        """The sequence is done with its blocks; those in the cache stay until room is needed."""
        self._private -= lease.private
        for block in reversed(lease.held):
            self._holders[block] -= 1
            if not self._holders[block]:
                self._idle[block] = None
        lease.held, lease.private = [], 0

    def clear(self) -> bool:
        """Forget everything; False, and no change, while a sequence holds blocks."""
        if len(self._idle) < len(self._holders) or self._private:
            return False
        self._holders.clear()
        self._parents.clear()
        self._idle.clear()
        self._events.append(BlocksCleared())
        return True

    def take_events(self) -> list[KVEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    @property
    def used(self) -> int:
        """Blocks that sequences hold."""
        return len(self._holders) - len(self._idle) + self._private

    @property
    def cached(self) -> frozenset[BlockId]:
        """Ids of all blocks that a lookup can hit."""
        return frozenset(self._holders)

    @property
    def _free(self) -> int:
        return self.capacity - len(self._holders) - self._private

    def _hold(self, block: BlockId) -> None:
        self._holders[block] += 1
        self._idle.pop(block, None)

    def _make_room(self, blocks: int) -> None:
        removed: list[BlockId] = []
        while self._free < blocks:
            block, _ = self._idle.popitem(last=False)
            del self._holders[block], self._parents[block]
            removed.append(block)
        if removed:
            self._events.append(BlocksRemoved(removed))

    def _stored(self, content: Content, blocks: list[BlockId], first: int) -> BlocksStored:
        start, end = first * self.block_tokens, (first + len(blocks)) * self.block_tokens
        shareable = None
        if content.shareable is not None and content.shareable < end:
            shareable = max(0, content.shareable // self.block_tokens - first)
        return BlocksStored(
            hashes=blocks,
            parent=self._parents[blocks[0]],
            tokens=content.tokens[start:end],
            block_tokens=self.block_tokens,
            adapter=content.adapter,
            salt=content.salt,
            shareable=shareable,
        )

    def check_integrity(self, leases: Sequence[Lease] = ()) -> None:
        """Assert the invariants; `leases` are all that are alive."""
        assert 0 <= self._private <= self.capacity
        assert self._free >= 0, "more blocks than there are"
        assert set(self._idle) == {block for block, holders in self._holders.items() if not holders}
        assert self._parents.keys() == self._holders.keys()
        assert all(parent is None or parent in self._holders for parent in self._parents.values())
        held: dict[BlockId, int] = dict.fromkeys(self._holders, 0)
        for lease in leases:
            assert lease.private >= 0
            for block in lease.held:
                held[block] += 1
        assert held == self._holders, "holders differ from the leases"
        assert self._private == sum(lease.private for lease in leases)
