"""The prefix index: who holds which leading chunks, exactly, through any order of changes."""

from __future__ import annotations

import random
import tracemalloc
from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache_store.events import ChunkKey, Tier
from router.index import MAX_RETIRED_SLOTS, PrefixIndex

HOLDERS = ("a", "b", "c", "d", "e")
TIERS: tuple[Tier, ...] = ("hbm", "dram", "disk")


def make_key(number: int, first_byte: int | None = None) -> ChunkKey:
    digest = random.Random(number).randbytes(32)
    return ChunkKey(digest if first_byte is None else bytes([first_byte]) + digest[1:])


# Few first bytes, so that shards hold several keys; the last one's shard is the last to be swept.
POOL = [make_key(number, (0, 7, 255)[number % 3]) for number in range(24)]

keys_of_pool = st.lists(st.sampled_from(POOL), max_size=12)


class IndexAgainstSets(RuleBasedStateMachine):
    """Any interleaving of changes and sweeps leaves the index equal to a dictionary of sets."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.model: dict[tuple[str, Tier], set[ChunkKey]] = defaultdict(set)

    @rule(
        holder=st.sampled_from(HOLDERS),
        tier=st.sampled_from(TIERS),
        added=keys_of_pool,
        removed=keys_of_pool,
        cleared=st.booleans(),
    )
    def apply(
        self, holder: str, tier: Tier, added: list[ChunkKey], removed: list[ChunkKey], cleared: bool
    ) -> None:
        self.index.apply(holder, tier, added, removed, cleared)
        held = set() if cleared else self.model[holder, tier]
        self.model[holder, tier] = (held - set(removed)) | set(added)

    @rule(holder=st.sampled_from(HOLDERS), tier=st.sampled_from(TIERS), keys=keys_of_pool)
    def replace(self, holder: str, tier: Tier, keys: list[ChunkKey]) -> None:
        self.index.replace(holder, tier, keys)
        self.model[holder, tier] = set(keys)

    @rule(holder=st.sampled_from(HOLDERS))
    def drop(self, holder: str) -> None:
        self.index.drop(holder)
        for tier in TIERS:
            self.model.pop((holder, tier), None)

    @rule(max_keys=st.integers(1, 600))
    def sweep(self, max_keys: int) -> None:
        self.index.sweep(max_keys)

    @rule(prompt=st.lists(st.sampled_from(POOL), max_size=10, unique=True))
    def match(self, prompt: list[ChunkKey]) -> None:
        match = self.index.match(prompt)
        assert match.chunks == len(prompt)
        for tier in TIERS:
            for holder in HOLDERS:
                assert match.leading(holder, tier) == leading(prompt, self.model[holder, tier])
            union = set().union(*(self.model[holder, tier] for holder in HOLDERS))
            for start in range(len(prompt) + 1):
                assert match.anywhere(tier, start) == leading(prompt[start:], union)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        for tier in TIERS:
            for holder in HOLDERS:
                assert self.index.held(holder, tier) == self.model[holder, tier]
        for tier, stats in self.index.stats().items():
            for holder, chunks in stats.chunks.items():
                assert chunks == len(self.model[holder, tier])

    @invariant()
    def is_sound(self) -> None:
        self.index.check_integrity()


def leading(prompt: list[ChunkKey], held: set[ChunkKey]) -> int:
    count = 0
    for key in prompt:
        if key not in held:
            break
        count += 1
    return count


IndexAgainstSets.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_index_equals_a_dictionary_of_sets = IndexAgainstSets.TestCase


def test_only_the_contiguous_prefix_counts() -> None:
    index = PrefixIndex()
    index.apply("a", "hbm", added=[POOL[0], POOL[1], POOL[3]])
    match = index.match(POOL[:5])
    assert match.leading("a") == 2
    assert match.leading("unknown") == 0
    assert match.anywhere("hbm", start=3) == 1


def test_a_tier_can_cover_a_prefix_that_no_single_holder_has() -> None:
    index = PrefixIndex()
    index.apply("node-1", "dram", added=POOL[:2])
    index.apply("node-2", "dram", added=POOL[2:4])
    match = index.match(POOL[:6])
    assert (match.leading("node-1", "dram"), match.leading("node-2", "dram")) == (2, 0)
    assert match.anywhere("dram") == 4
    assert match.anywhere("dram", start=3) == 1
    assert match.anywhere("disk") == 0


def test_a_prompt_without_full_chunks_matches_nothing() -> None:
    index = PrefixIndex()
    index.apply("a", "hbm", added=POOL)
    match = index.match([])
    assert match.chunks == 0
    assert match.leading("a") == 0


def test_a_dropped_holder_is_out_of_every_answer_before_any_sweep() -> None:
    index = PrefixIndex()
    keys = [make_key(number) for number in range(20_000)]
    for tier in TIERS:
        index.replace("gone", tier, keys)
        index.replace("stays", tier, keys[:100])
    index.drop("gone")
    assert index.stats()["hbm"].retired_slots == 1, "the entries are still to be swept"
    match = index.match(keys[:64])
    for tier in TIERS:
        assert match.leading("gone", tier) == 0
        assert match.leading("stays", tier) == 64
        assert index.held("gone", tier) == set()
        assert index.match(keys[100:164]).anywhere(tier) == 0
    assert index.holders() == {"stays"}


def test_a_new_holder_inherits_nothing_from_a_departed_one() -> None:
    index = PrefixIndex()
    keys = [make_key(number) for number in range(5_000)]
    index.replace("old", "hbm", keys)
    index.drop("old")
    for number in range(10):
        index.apply(f"new-{number}", "hbm", added=[keys[0]])
        assert index.held(f"new-{number}", "hbm") == {keys[0]}
        index.sweep(1000)
    index.check_integrity()


def test_sweeping_frees_what_only_departed_holders_had() -> None:
    index = PrefixIndex()
    keys = [make_key(number) for number in range(5_000)]
    index.replace("gone", "hbm", keys)
    index.replace("stays", "hbm", keys[:10])
    index.drop("gone")
    portions = 1
    while index.sweep(500):
        portions += 1
    assert portions > 5, "the sweep comes in portions"
    stats = index.stats()["hbm"]
    assert (stats.entries, stats.retired_slots, stats.chunks) == (10, 0, {"stays": 10})


def test_a_busy_index_sweeps_itself() -> None:
    index = PrefixIndex()
    index.replace("gone", "hbm", [make_key(number) for number in range(2_000)])
    index.drop("gone")
    for number in range(2_000):
        index.apply("busy", "hbm", added=[make_key(number % 7)])
    stats = index.stats()["hbm"]
    assert (stats.entries, stats.retired_slots) == (7, 0)


def test_slots_stay_few_however_often_holders_come_and_go() -> None:
    index = PrefixIndex()
    index.replace("large", "hbm", [make_key(number) for number in range(30_000)])
    widest = 0
    for number in range(500):
        index.replace("flapping", "hbm", [make_key(number)])
        widest = max(widest, index.stats()["hbm"].retired_slots)
    assert widest <= MAX_RETIRED_SLOTS
    assert index.held("flapping", "hbm") == {make_key(499)}
    index.check_integrity()


def test_a_chunk_takes_less_than_300_bytes_at_16_holders() -> None:
    chunks = 20_000
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = PrefixIndex()
        for start in range(0, chunks, 64):
            keys = [ChunkKey(random.Random(start + n).randbytes(32)) for n in range(64)]
            for holder in range(16):
                index.apply(f"replica-{holder}", "hbm", added=keys)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    entries = index.stats()["hbm"].entries
    assert entries >= chunks
    assert used / entries < 300
