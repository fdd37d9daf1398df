"""The simulated engine's prefix cache, against a brute-force reading of its own events."""

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.kv_events import BlocksCleared, BlocksRemoved, BlocksStored
from workers.sim.block_cache import BlockCache, Content, Lease

BLOCK = 4


def content(*tokens, **fields):
    return Content(array("I", tokens), **fields)


def blocks_of(sequence):
    return -(-len(sequence.tokens) // BLOCK)


def compute(cache, sequence):
    """Admit a sequence and compute its whole prompt."""
    lease = cache.acquire(sequence, blocks_of(sequence))
    assert lease is not None
    hit = len(lease.held)
    cache.store(lease, sequence, len(sequence.tokens))
    return lease, hit


class Replayed:
    """What a listener knows of the cache: block id -> the tokens up to and with that block."""

    def __init__(self):
        self.prefixes = {}

    def apply(self, events):
        for event in events:
            if isinstance(event, BlocksCleared):
                self.prefixes.clear()
            elif isinstance(event, BlocksRemoved):
                for block in event.hashes:
                    del self.prefixes[block]
            else:
                self._store(event)

    def _store(self, event: BlocksStored):
        assert len(event.tokens) == len(event.hashes) * event.block_tokens
        prefix = (event.salt,) if event.parent is None else self.prefixes[event.parent]
        for index, block in enumerate(event.hashes):
            prefix += tuple(event.tokens[index * BLOCK : (index + 1) * BLOCK])
            assert block not in self.prefixes, "stored twice"
            self.prefixes[block] = prefix


class CacheMachine(RuleBasedStateMachine):
    """Sequences over few tokens and salts come, grow and go in any order."""

    def __init__(self):
        super().__init__()
        self.cache = BlockCache(capacity=9, block_tokens=BLOCK)
        self.alive: list[tuple[Content, Lease]] = []
        self.replayed = Replayed()

    @rule(
        tokens=st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=24),
        salt=st.sampled_from(["", "", "other"]),
    )
    def admit(self, tokens, salt):
        sequence = content(*tokens, salt=salt)
        known = set(self.replayed.prefixes.values())
        best = 0
        while (best + 1) * BLOCK < len(tokens) and (salt, *tokens[: (best + 1) * BLOCK]) in known:
            best += 1
        idle = self.cache.capacity - self.cache.used
        lease = self.cache.acquire(sequence, blocks_of(sequence))
        if lease is None:
            assert blocks_of(sequence) > idle
            return
        assert len(lease.held) == best
        assert lease.blocks == blocks_of(sequence)
        self.alive.append((sequence, lease))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), token=st.sampled_from([1, 2]))
    def compute_and_generate(self, data, token):
        sequence, lease = data.draw(st.sampled_from(self.alive))
        self.cache.store(lease, sequence, len(sequence.tokens))
        sequence.tokens.append(token)
        if blocks_of(sequence) > lease.blocks and not self.cache.grow(lease):
            assert self.cache.used == self.cache.capacity
            sequence.tokens.pop()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.alive) - 1))
        self.cache.release(self.alive.pop(index)[1])

    @rule()
    def clear(self):
        assert self.cache.clear() == (not any(lease.blocks for _, lease in self.alive))

    @invariant()
    def events_tell_what_is_cached(self):
        self.replayed.apply(self.cache.take_events())
        assert self.replayed.prefixes.keys() == self.cache.cached
        assert len(set(self.replayed.prefixes.values())) == len(self.replayed.prefixes)
        self.cache.check_integrity([lease for _, lease in self.alive])


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_any_interleaving_keeps_cache_and_events_together = CacheMachine.TestCase


def test_a_repeated_prompt_hits_all_but_the_block_of_its_last_token():
    cache = BlockCache(16, BLOCK)
    prompt = range(3 * BLOCK)
    first, _ = compute(cache, content(*prompt))
    cache.release(first)
    _, hit = compute(cache, content(*prompt))
    assert hit == 2
    _, hit = compute(cache, content(*prompt, 99))
    assert hit == 3


def test_equal_blocks_of_two_running_sequences_are_kept_once():
    cache = BlockCache(16, BLOCK)
    one, two = content(*range(BLOCK)), content(*range(BLOCK))
    leases = [cache.acquire(one, 1), cache.acquire(two, 1)]
    assert cache.used == 2
    cache.store(leases[0], one, BLOCK)
    cache.store(leases[1], two, BLOCK)
    assert cache.used == 1
    assert len(cache.take_events()) == 1
    cache.check_integrity(leases)


def test_eviction_takes_the_oldest_sequence_and_its_end_first():
    cache = BlockCache(4, BLOCK)
    old, new = content(*range(2 * BLOCK)), content(*range(50, 50 + 2 * BLOCK))
    for sequence in (old, new):
        lease, _ = compute(cache, sequence)
        cache.release(lease)
    cache.take_events()
    compute(cache, content(*range(90, 90 + BLOCK)))
    removed = [event for event in cache.take_events() if isinstance(event, BlocksRemoved)]
    assert [list(event.hashes) for event in removed] == [[old.chain[1]]]


def test_no_room_changes_nothing():
    cache = BlockCache(4, BLOCK)
    lease, _ = compute(cache, content(*range(3 * BLOCK)))
    cache.take_events()
    assert cache.acquire(content(*range(70, 70 + 2 * BLOCK)), 2) is None
    assert cache.take_events() == []
    cache.check_integrity([lease])


def test_salt_adapter_and_media_separate_equal_tokens():
    variants = [
        content(*range(9)),
        content(*range(9), salt="a"),
        content(*range(9), adapter="a"),
        content(*range(9), media=((2, b"cat"),)),
        content(*range(9), media=((2, b"dog"),)),
    ]
    cache = BlockCache(32, BLOCK)
    assert [compute(cache, variant)[1] for variant in variants] == [0] * len(variants)


def test_an_image_leaves_the_blocks_before_it_shared():
    cache = BlockCache(32, BLOCK)
    compute(cache, content(*range(13), media=((9, b"cat"),)))
    _, hit = compute(cache, content(*range(13), media=((9, b"dog"),)))
    assert hit == 2


def test_events_say_how_many_blocks_tokens_alone_determine():
    cache = BlockCache(32, BLOCK)
    sequence = content(*range(12), shareable=6, media=((6, b"cat"),))
    lease, _ = compute(cache, sequence)
    cache.grow(lease)
    sequence.tokens.extend(range(4))
    cache.store(lease, sequence, 16)
    assert [event.shareable for event in cache.take_events()] == [1, 0]


def test_whole_shareable_runs_are_not_marked():
    cache = BlockCache(32, BLOCK)
    compute(cache, content(*range(9), shareable=9))
    assert [event.shareable for event in cache.take_events()] == [None]
