"""Who holds which chunk: chunk key -> holders, per tier.

A chunk's holders are the bits of one integer; every holder has a slot, a bit position, in each of its
tiers. A holder that leaves loses its slot, which is one bit cleared in the tier's mask of live slots: it is
out of every answer at once, however many chunks it held. The stale bits in the entries are swept later, in
small portions, and only then is the slot given to another holder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cache_store.events import ChunkKey, Tier

SHARDS = 256
SWEEP_PER_CHANGE = 4
"""Entries swept for each key changed, so that a busy index stays clean without its owner's help."""
SWEEP_FLOOR = 64
"""Entries that any change sweeps at least, however small it is."""
MAX_RETIRED_SLOTS = 64
"""More slots than this waiting for the sweep are swept on the spot: it bounds the width of the masks."""


@dataclass(frozen=True, slots=True)
class TierMatch:
    """What one tier holds of a sequence of chunks."""

    leading: Mapping[str, int] = field(default_factory=dict)
    """Holder -> how many leading chunks it holds itself, without a gap. Holders of none are left out."""
    present: int = 0
    """Bit i is set when any holder has chunk i."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Holder -> its own such bits; filled for all tiers but hbm, of which only the leading chunks are of use."""

    def anywhere(self, start: int = 0) -> int:
        """Consecutive chunks from chunk number `start` on that the tier holds, each by any holder."""
        bits = self.present >> start
        return (~bits & (bits + 1)).bit_length() - 1


_NOTHING = TierMatch()


@dataclass(frozen=True, slots=True)
class Match:
    """What the cluster holds of a sequence of chunks, at the moment of the lookup."""

    chunks: int
    tiers: Mapping[Tier, TierMatch]
    """Tiers that hold nothing of the sequence may be left out."""

    def leading(self, holder: str, tier: Tier = "hbm") -> int:
        """Leading chunks that the holder has in that tier; only the contiguous prefix counts."""
        return self.tiers.get(tier, _NOTHING).leading.get(holder, 0)

    def anywhere(self, tier: Tier, start: int = 0) -> int:
        """Consecutive chunks from `start` on that the tier holds, on whatever holders."""
        return self.tiers.get(tier, _NOTHING).anywhere(start)


@dataclass(frozen=True, slots=True)
class TierStats:
    entries: int
    """Distinct chunks, those that only departed holders had included until they are swept."""
    chunks: Mapping[str, int]
    """Holder -> chunks that it holds."""
    retired_slots: int
    """Slots of departed holders that wait for the sweep."""


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class _TierIndex:
    """One tier. Slots are either live (of a holder), retired (to be swept) or free (no entry has the bit)."""

    def __init__(self) -> None:
        # Shards by the key's first byte: chunk keys are digests, so they fill evenly, and one shard can be
        # rebuilt in a fraction of a millisecond.
        self.shards: list[dict[ChunkKey, int]] = [{} for _ in range(SHARDS)]
        self.slot_of: dict[str, int] = {}
        self.holders: list[str | None] = []
        self.counts: list[int] = []
        self.live = 0
        self.retired = 0
        self._free: list[int] = []
        self._pass_mask = 0
        self._next_shard = 0
        self._debt = 0

    def entries(self) -> int:
        return sum(len(shard) for shard in self.shards)

    def slot(self, holder: str) -> int:
        slot = self.slot_of.get(holder)
        if slot is None:
            if self._free:
                slot = self._free.pop()
            else:
                slot = len(self.holders)
                self.holders.append(None)
                self.counts.append(0)
            self.slot_of[holder] = slot
            self.holders[slot] = holder
            self.live |= 1 << slot
        return slot

    def retire(self, holder: str) -> None:
        slot = self.slot_of.pop(holder, None)
        if slot is None:
            return
        self.holders[slot] = None
        self.live &= ~(1 << slot)
        if self.counts[slot]:
            self.counts[slot] = 0
            self.retired |= 1 << slot
        else:
            self._free.append(slot)

    def add(self, holder: str, keys: Iterable[ChunkKey]) -> int:
        slot = self.slot(holder)
        bit, shards, seen, added = 1 << slot, self.shards, 0, 0
        for key in keys:
            seen += 1
            shard = shards[key[0]]
            mask = shard.get(key, 0)
            if not mask & bit:
                shard[key] = mask | bit
                added += 1
        self.counts[slot] += added
        return seen

    def remove(self, holder: str, keys: Iterable[ChunkKey]) -> int:
        slot = self.slot(holder)
        bit, seen = 1 << slot, 0
        for key in keys:
            seen += 1
            shard = self.shards[key[0]]
            mask = shard.get(key, 0)
            if mask & bit:
                self.counts[slot] -= 1
                if mask == bit:
                    del shard[key]
                else:
                    shard[key] = mask ^ bit
        return seen

    def held(self, keys: Sequence[ChunkKey]) -> dict[str, int]:
        """Holder -> bit i set when it has chunk i."""
        found: dict[int, int] = {}
        for position, key in enumerate(keys):
            for slot in _bits(self.shards[key[0]].get(key, 0) & self.live):
                found[slot] = found.get(slot, 0) | 1 << position
        return {self._holder(slot): bits for slot, bits in found.items()}

    def match(self, keys: Sequence[ChunkKey], with_held: bool) -> TierMatch:
        shards, live = self.shards, self.live
        unbroken, present, bit, leading = live, 0, 1, {}
        for position, key in enumerate(keys):
            held = shards[key[0]].get(key, 0) & live
            if held:
                present |= bit
            bit <<= 1
            lost = unbroken & ~held
            if lost:
                if position:
                    for slot in _bits(lost):
                        leading[self._holder(slot)] = position
                unbroken ^= lost
        if keys:
            for slot in _bits(unbroken):
                leading[self._holder(slot)] = len(keys)
        return TierMatch(leading, present, self.held(keys) if with_held and present else {})

    def sweep(self, max_entries: int) -> int:
        """Visit about that many entries, whole shards at a time; returns how many. 0 when all is clean."""
        visited = 0
        while visited < max_entries and self.retired:
            if not self._next_shard:
                self._pass_mask = self.retired
            keep, shard = ~self._pass_mask, self.shards[self._next_shard]
            visited += len(shard) + 1
            # A new dict, not deletions in the old one: a dict never gives its memory back while it lives.
            self.shards[self._next_shard] = {key: mask & keep for key, mask in shard.items() if mask & keep}
            self._next_shard = (self._next_shard + 1) % SHARDS
            if not self._next_shard:
                self.retired &= ~self._pass_mask
                self._free.extend(_bits(self._pass_mask))
        return visited

    def owe_sweep(self, changed: int) -> None:
        """Sweep in proportion to what changed. A shard larger than that is paid for over several changes."""
        if not self.retired:
            self._debt = 0
            return
        if self.retired.bit_count() > MAX_RETIRED_SLOTS:
            while self.retired:
                self.sweep(self.entries() + SHARDS)
            return
        self._debt += SWEEP_FLOOR + SWEEP_PER_CHANGE * changed
        while self.retired and self._debt > len(self.shards[self._next_shard]):
            self._debt -= self.sweep(1)

    def check_integrity(self) -> None:
        counts = [0] * len(self.holders)
        for number, shard in enumerate(self.shards):
            for key, mask in shard.items():
                assert key[0] == number, f"{key.hex()} is in shard {number}"
                assert mask, f"{key.hex()} has no holder"
                assert not mask & ~(self.live | self.retired), f"{key.hex()} has a bit of a free slot"
                for slot in _bits(mask & self.live):
                    counts[slot] += 1
        assert counts == self.counts, f"counted {counts}, recorded {self.counts}"
        assert not self.live & self.retired
        assert {h: s for s, h in enumerate(self.holders) if h is not None} == self.slot_of
        assert sum(1 << slot for slot in self.slot_of.values()) == self.live
        free = sum(1 << slot for slot in self._free)
        assert free.bit_count() == len(self._free), "a slot is free twice"
        assert self.live + self.retired + free == (1 << len(self.holders)) - 1, "a slot is lost"

    def _holder(self, slot: int) -> str:
        holder = self.holders[slot]
        assert holder is not None
        return holder


class PrefixIndex:
    """Chunk key -> holders, for every tier. Not thread-safe; lives on a router's event loop.

    Keys are chains: a holder's leading chunks of a prompt are the prompt's prefix that it need not compute.
    What a holder says of its tiers is applied as it is: adding a held key or removing an absent one changes
    nothing.
    """

    def __init__(self) -> None:
        self._tiers: dict[Tier, _TierIndex] = {}

    def apply(
        self,
        holder: str,
        tier: Tier,
        added: Iterable[ChunkKey] = (),
        removed: Iterable[ChunkKey] = (),
        cleared: bool = False,
    ) -> None:
        """One delta: `cleared` applies first, then `removed`, then `added`. Unknown holders become known."""
        index = self._tier(tier)
        if cleared:
            index.retire(holder)
        changed = index.remove(holder, removed)
        changed += index.add(holder, added)
        index.owe_sweep(changed)

    def replace(self, holder: str, tier: Tier, keys: Iterable[ChunkKey]) -> None:
        """A snapshot: from now on the holder has exactly these keys in that tier."""
        self.apply(holder, tier, added=keys, cleared=True)

    def drop(self, holder: str) -> None:
        """The holder is gone from every tier at once. An unknown holder is ignored."""
        for index in self._tiers.values():
            index.retire(holder)
            index.owe_sweep(0)

    def match(self, keys: Sequence[ChunkKey]) -> Match:
        """What every holder has of `keys`, the chunk keys of one prompt in their order."""
        return Match(
            len(keys),
            {tier: index.match(keys, tier != "hbm") for tier, index in self._tiers.items() if index.live},
        )

    def sweep(self, max_keys: int) -> bool:
        """Remove what departed holders left, visiting about `max_keys` entries. True while more is to do.

        For the owner's idle moments; changes do the same by themselves in proportion to their size.
        """
        for index in self._tiers.values():
            max_keys -= index.sweep(max_keys)
        return any(index.retired for index in self._tiers.values())

    def holders(self) -> set[str]:
        """Every holder known, those that hold nothing included."""
        return {holder for index in self._tiers.values() for holder in index.slot_of}

    def held(self, holder: str, tier: Tier) -> set[ChunkKey]:
        """All that the holder has in a tier. Walks the whole tier: for inspection, not for requests."""
        index = self._tiers.get(tier)
        if index is None or holder not in index.slot_of:
            return set()
        bit = 1 << index.slot_of[holder]
        return {key for shard in index.shards for key, mask in shard.items() if mask & bit}

    def stats(self) -> dict[Tier, TierStats]:
        return {
            tier: TierStats(
                index.entries(),
                {holder: index.counts[slot] for holder, slot in index.slot_of.items()},
                index.retired.bit_count(),
            )
            for tier, index in self._tiers.items()
        }

    def check_integrity(self) -> None:
        """Raises AssertionError when counts, slots and entries do not fit together. Walks everything."""
        for index in self._tiers.values():
            index.check_integrity()

    def _tier(self, tier: Tier) -> _TierIndex:
        if tier not in self._tiers:
            self._tiers[tier] = _TierIndex()
        return self._tiers[tier]
