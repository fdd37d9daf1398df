"""From an engine's blocks to chunks: never more than the engine holds, and all of it where events allow."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.keys import chunk_keys, namespace
from workers.chunk_tracker import ChunkTracker
from workers.kv_events import BlocksCleared, BlocksRemoved, BlocksStored, KVEvent

IDENTITY = bytes(32)
BLOCK, CHUNK = 2, 6
Hash = tuple[object, ...]


def tracker() -> ChunkTracker:
    return ChunkTracker(IDENTITY, BLOCK, CHUNK)


def hashes(tokens: Sequence[int], adapter: str = "", salt: str = "") -> list[Hash]:
    """The engine's ids of a sequence's full blocks: a function of all that came before."""
    return [(adapter, salt, *tokens[: i + BLOCK]) for i in range(0, len(tokens) - len(tokens) % BLOCK, BLOCK)]


def stored(
    tokens: Sequence[int],
    start: int = 0,
    end: int | None = None,
    *,
    adapter: str = "",
    salt: str = "",
    shareable: int | None = None,
) -> BlocksStored:
    """The event for blocks `start` to `end` of a sequence."""
    ids = hashes(tokens, adapter, salt)
    end = len(ids) if end is None else end
    return BlocksStored(
        hashes=ids[start:end],
        parent=ids[start - 1] if start else None,
        tokens=list(tokens[start * BLOCK : end * BLOCK]),
        block_tokens=BLOCK,
        adapter=adapter,
        salt=salt if start == 0 else "",
        shareable=shareable,
    )


def keys(tokens: Sequence[int], adapter: str = "", salt: str = "") -> list[bytes]:
    return list(chunk_keys(namespace(IDENTITY, adapter, salt), tokens, CHUNK))


A = list(range(100, 112))
"""Two chunks of three blocks."""


def test_a_sequence_gives_the_keys_of_its_full_chunks() -> None:
    change = tracker().apply([stored([*A, 1, 2])])
    assert change == (keys(A), [], False)


def test_a_chunk_comes_with_its_last_block_and_goes_with_any() -> None:
    blocks = tracker()
    assert blocks.apply([stored(A, 0, 2)]).added == []
    assert blocks.apply([stored(A, 2, 3)]).added == keys(A)[:1]
    for gone in range(3):
        assert blocks.apply([BlocksRemoved([hashes(A)[gone]])]).removed == keys(A)[:1]
        assert blocks.apply([stored(A, 0, 3)]).added == keys(A)[:1]
        blocks.check_integrity()


def test_blocks_that_come_back_complete_the_chunks_whose_later_blocks_stayed() -> None:
    blocks = tracker()
    other = [*A[:4], 7, 8]
    blocks.apply([stored(A), stored(other, 2, 3)])
    assert set(blocks.apply([BlocksRemoved(hashes(A)[:2])]).removed) == {keys(A)[0], keys(other)[0]}
    assert blocks.chunks == {keys(A)[1]}
    assert set(blocks.apply([stored(A, 0, 2)]).added) == {keys(A)[0], keys(other)[0]}


def test_chunks_that_diverge_inside_share_their_leading_blocks() -> None:
    blocks = tracker()
    other = [*A[:4], 7, 8]
    assert set(blocks.apply([stored(A, 0, 3), stored(other, 2, 3)]).added) == {keys(A)[0], keys(other)[0]}
    assert blocks.apply([BlocksRemoved([hashes(A)[2]])]).removed == keys(A)[:1]
    assert blocks.chunks == set(keys(other))


def test_a_batch_tells_the_net_change() -> None:
    blocks = tracker()
    change = blocks.apply([stored(A), BlocksRemoved([hashes(A)[5]])])
    assert change == (keys(A)[:1], [], False)
    change = blocks.apply([BlocksRemoved([hashes(A)[0]]), stored(A, 0, 1)])
    assert change == ([], [], False)
    change = blocks.apply([BlocksRemoved([hashes(A)[0]]), BlocksCleared(), stored(A, 0, 3)])
    assert change == (keys(A)[:1], [], True)


def test_clearing_forgets_everything() -> None:
    blocks = tracker()
    assert blocks.apply([stored(A), BlocksCleared()]) == ([], [], True)
    assert (blocks.chunks, blocks.blocks) == (frozenset(), 0)
    assert blocks.apply([stored(A, 3, 6)]).added == []


def test_a_second_copy_keeps_the_block_until_its_own_removal() -> None:
    blocks = tracker()
    blocks.apply([stored(A), stored(A, 3, 6)])
    last = BlocksRemoved([hashes(A)[5]])
    assert blocks.apply([last]).removed == []
    assert blocks.apply([last]).removed == keys(A)[1:]


def test_a_report_of_cached_blocks_is_no_second_copy() -> None:
    blocks = tracker()
    assert blocks.apply([stored(A), stored(A), stored(A)]).added == keys(A)
    assert blocks.apply([BlocksRemoved([hashes(A)[5]])]).removed == keys(A)[1:]


def test_removing_what_is_not_there_changes_nothing() -> None:
    blocks = tracker()
    assert blocks.apply([BlocksRemoved(["unknown", hashes(A)[0]])]) == ([], [], False)
    blocks.apply([stored(A), BlocksRemoved([hashes(A)[0]])])
    assert blocks.apply([BlocksRemoved([hashes(A)[0]])]) == ([], [], False)


def test_children_of_an_unknown_parent_are_counted_and_never_keyed() -> None:
    blocks = tracker()
    assert blocks.apply([stored(A, 3, 6)]).added == []
    assert (blocks.unknown_parents, blocks.blocks) == (1, 0)
    assert blocks.apply([stored(A)]).added == keys(A)


def test_blocks_and_tokens_that_do_not_fit_are_counted_and_ignored() -> None:
    blocks = tracker()
    good = stored(A)
    bad = [
        BlocksStored(good.hashes, None, good.tokens[:-1], BLOCK),
        BlocksStored(good.hashes, None, good.tokens, 2 * BLOCK),
        BlocksStored(good.hashes, None, [-1, *good.tokens[1:]], BLOCK),
    ]
    assert blocks.apply(bad) == ([], [], False)
    assert (blocks.malformed, blocks.blocks) == (3, 0)


def test_the_first_block_that_holds_more_than_tokens_ends_the_prefix() -> None:
    blocks = tracker()
    assert blocks.apply([stored(A, 0, 5, shareable=3), stored(A, 5, 6)]).added == keys(A)[:1]
    assert blocks.unknown_parents == 0
    blocks.apply([BlocksRemoved(hashes(A))])
    assert blocks.blocks == 0


def test_nothing_is_keyed_where_the_first_block_holds_more_than_tokens() -> None:
    assert tracker().apply([stored(A, shareable=0)]).added == []


@pytest.mark.parametrize(("adapter", "salt"), [("lora@1", ""), ("", "tenant"), ("lora@1", "tenant")])
def test_adapter_and_salt_of_the_root_are_in_the_keys_of_the_whole_chain(adapter: str, salt: str) -> None:
    blocks = tracker()
    pieces = [stored(A, 0, 2, adapter=adapter, salt=salt), stored(A, 2, 6, adapter=adapter, salt=salt)]
    assert blocks.apply(pieces).added == keys(A, adapter, salt)
    assert not blocks.chunks & set(keys(A))


def test_a_chunk_stays_while_any_of_two_engine_ids_stands_for_it() -> None:
    blocks = tracker()
    twin = BlocksStored(["x", "y", "z"], None, A[:6], BLOCK)
    assert blocks.apply([stored(A, 0, 3), twin]).added == keys(A)[:1]
    assert blocks.apply([BlocksRemoved(["y"])]).removed == []
    assert blocks.apply([BlocksRemoved([hashes(A)[0]])]).removed == keys(A)[:1]


def test_a_chunk_of_one_block() -> None:
    blocks = ChunkTracker(IDENTITY, CHUNK, CHUNK)
    assert blocks.apply([BlocksStored([1, 2], None, A, CHUNK)]).added == keys(A)
    assert blocks.apply([BlocksRemoved([1])]).removed == keys(A)[:1]
    assert blocks.apply([BlocksStored([1], None, A[:6], CHUNK)]).added == keys(A)[:1]
    blocks.check_integrity()


def test_a_chunk_that_is_no_whole_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_tokens is 7"):
        ChunkTracker(IDENTITY, 2, 7)


class Engine:
    """The truth: physical blocks of a cache, and the events that it makes.

    Any copy of any block may go at any time, but what is stored follows blocks that are there.
    """

    def __init__(self) -> None:
        self.copies: Counter[Hash] = Counter()
        self.sequences: dict[Hash, tuple[list[int], int]] = {}

    def store(
        self, tokens: list[int], salt: str, image_at: int, *, duplicate: bool, pieces: bool
    ) -> list[KVEvent]:
        """A request computes its blocks after the longest cached prefix.

        With `duplicate` it does so after its first block, as one that was admitted before the others were
        cached. With `pieces` it computes the first block of a sequence for itself, as in chunked prefill, so
        that all that may be a second copy has a parent.
        """
        ids = hashes(tokens, salt=salt)
        cached = 0
        while cached < len(ids) and self.copies[ids[cached]]:
            cached += 1
        start = min(cached, 1) if duplicate else cached
        self.copies.update(ids[start:])
        self.sequences.update(dict.fromkeys(ids, (tokens, image_at)))
        cuts = [start, len(ids)] if start or not pieces else [0, 1, len(ids)]
        return [
            stored(tokens, a, b, salt=salt, shareable=min(max(0, image_at - a), b - a))
            for a, b in pairwise(cuts)
            if a < b <= len(ids)
        ]

    def remove(self, victims: Iterable[Hash]) -> list[KVEvent]:
        gone = [each for each in victims if self.copies[each] > 0]
        self.copies.subtract(gone)
        return [BlocksRemoved([each]) for each in gone]

    def report(self, tokens: list[int], salt: str, image_at: int) -> list[KVEvent]:
        """Says the cached prefix of a request again."""
        ids = hashes(tokens, salt=salt)
        cached = 0
        while cached < len(ids) and self.copies[ids[cached]] > 0:
            cached += 1
        return [stored(tokens, 0, cached, salt=salt, shareable=min(image_at, cached))] if cached else []

    def chunks(self) -> set[bytes]:
        """Recomputed from the blocks that are there."""
        found: set[bytes] = set()
        per_chunk = CHUNK // BLOCK
        for each, (tokens, image_at) in self.sequences.items():
            ids, length = hashes(tokens, salt=str(each[1])), (len(each) - 2) // BLOCK
            if length % per_chunk or length > image_at:
                continue
            if all(self.copies[each] > 0 for each in ids[length - per_chunk : length]):
                found.add(keys(tokens[: length * BLOCK], salt=str(each[1]))[-1])
        return found


def run(seed: int, steps: int, reports: bool) -> None:
    """Few tokens, so that sequences share blocks often. Equal salts mean equal places of the image, since the
    ids of this engine don't tell images apart."""
    rng, engine, blocks = random.Random(seed), Engine(), tracker()
    believed: set[bytes] = set()
    for _ in range(steps):
        batch: list[KVEvent] = []
        for _ in range(rng.randint(1, 3)):
            tokens = [rng.randint(0, 1) for _ in range(rng.randint(0, 16))]
            salt, image_at = rng.choice([("", 99), ("tenant", 99), ("image", 4)])
            action = rng.random()
            if action < 0.5:
                batch += engine.store(
                    tokens, salt, image_at, duplicate=rng.random() < 0.3, pieces=not reports
                )
            elif action < 0.9:
                present = sorted((each for each, count in engine.copies.items() if count > 0), key=repr)
                batch += engine.remove(rng.sample(present, min(len(present), rng.randint(1, 6))))
            elif reports:
                batch += engine.report(tokens, salt, image_at)
            elif action > 0.98:
                engine.copies.clear()
                batch.append(BlocksCleared())
        change = blocks.apply(batch)
        believed = ((set() if change.cleared else believed) - set(change.removed)) | set(change.added)
        blocks.check_integrity()
        assert believed == blocks.chunks
        present = sum(count > 0 for count in engine.copies.values())
        assert blocks.blocks <= present * CHUNK // BLOCK
        if reports:
            assert believed <= engine.chunks()
        else:
            assert believed == engine.chunks()
    blocks.apply(engine.remove([each for each, n in engine.copies.items() for _ in range(n)]))
    assert (blocks.chunks, blocks.blocks) == (frozenset(), 0)


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_chunks_are_those_whose_blocks_are_all_there(seed: int) -> None:
    run(seed, steps=40, reports=False)


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=60)
def test_with_cached_blocks_reported_again_chunks_are_never_too_many(seed: int) -> None:
    run(seed, steps=40, reports=True)


@given(st.integers(0, 2**32))
@settings(deadline=None, max_examples=40)
def test_events_in_any_order_break_nothing(seed: int) -> None:
    """What no engine would say: children before parents, removals of what never was."""
    rng, blocks = random.Random(seed), tracker()
    for _ in range(60):
        tokens = [rng.randint(0, 1) for _ in range(12)]
        start = rng.randint(0, 5)
        if rng.random() < 0.6:
            blocks.apply([stored(tokens, start, rng.randint(start, 6), shareable=rng.choice([None, 0, 2]))])
        else:
            blocks.apply([BlocksRemoved(rng.sample(hashes(tokens), 2))])
        blocks.check_integrity()
