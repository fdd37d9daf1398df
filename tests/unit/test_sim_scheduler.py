"""Continuous batching of the simulated engine, in simulated time."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import SimConfig
from workers.sim.block_cache import BlockCache, Content
from workers.sim.scheduler import Scheduler
from workers.sim.sequence import Sampling, Sequence

BLOCK = 4


def make(**fields):
    settings = {
        "prefill_tokens_per_s": 100.0,
        "prefill_overhead_s": 0.0,
        "decode_tokens_per_s": 10.0,
        "decode_slowdown": 0.0,
        "block_tokens": BLOCK,
        "blocks": 64,
        "max_running": 8,
    }
    config = SimConfig(**(settings | fields))
    return Scheduler(config, BlockCache(config.blocks, config.block_tokens))


def sequence(tokens, max_tokens=3, arrival=0.0, **sampling):
    return Sequence(Content(array("I", tokens)), Sampling(max_tokens, **sampling), arrival)


def run(scheduler, until=1e9):
    """Every output as (time, sequence, tokens), in order."""
    seen = []
    while (at := scheduler.next_at()) is not None and at <= until:
        for each in scheduler.advance(at):
            seen.append((round(at, 6), each, each.take().token_ids))
        scheduler.check_integrity()
    return seen


def test_first_token_comes_with_the_end_of_prefill_and_the_others_at_the_decode_rate():
    scheduler = make()
    only = sequence(range(50), max_tokens=3)
    scheduler.add(only, 0.0)
    assert [(at, len(tokens)) for at, _, tokens in run(scheduler)] == [(0.5, 1), (0.6, 1), (0.7, 1)]
    assert only.finish_reason == "length"


def test_prefills_queue_behind_each_other_in_order_of_arrival():
    scheduler = make()
    three = [sequence(range(start, start + 50), max_tokens=1) for start in (0, 100, 200)]
    for each in three:
        scheduler.add(each, 0.0)
    assert scheduler.load(0.0).waiting == 2
    assert [(at, each) for at, each, _ in run(scheduler)] == list(zip((0.5, 1.0, 1.5), three, strict=True))


def test_running_streams_share_each_step_and_slow_it_down():
    scheduler = make(decode_slowdown=0.5, prefill_tokens_per_s=1e9)
    two = [sequence([start] * 5, max_tokens=3) for start in (1, 2)]
    for each in two:
        scheduler.add(each, 0.0)
    # The second joins while the first step is under way, and takes part from the next one on.
    assert [(at, each) for at, each, _ in run(scheduler) if at > 0] == [
        (0.1, two[0]),
        (0.25, two[0]),
        (0.25, two[1]),
        (0.35, two[1]),
    ]


def test_a_hit_is_not_prefilled_again():
    scheduler = make()
    scheduler.add(sequence(range(50), max_tokens=1), 0.0)
    run(scheduler)
    again = sequence(range(50), max_tokens=1, arrival=10.0)
    scheduler.add(again, 10.0)
    assert again.cached_tokens == 48
    assert scheduler.next_at() == pytest.approx(10.02)


def test_no_more_than_max_running_are_at_work():
    scheduler = make(max_running=2, prefill_tokens_per_s=1e9)
    for start in range(5):
        scheduler.add(sequence([start] * 5, max_tokens=100), 0.0)
    scheduler.advance(1.0)
    load = scheduler.load(1.0)
    assert (load.running, load.waiting) == (2, 3)
    scheduler.check_integrity()


def test_a_sequence_without_room_waits_and_is_not_overtaken():
    scheduler = make(blocks=8, prefill_tokens_per_s=1e9)
    holder = sequence(range(20), max_tokens=8)
    large, small = sequence(range(100, 128), max_tokens=1), sequence([7] * 4, max_tokens=1)
    for each in (holder, large, small):
        scheduler.add(each, 0.0)
    assert list(dict.fromkeys(each for _, each, _ in run(scheduler))) == [holder, large, small]


def test_streams_that_outgrow_the_cache_give_way_and_still_say_all_their_words():
    scheduler = make(blocks=10, prefill_tokens_per_s=1e9)
    two = [sequence(range(start, start + 14), max_tokens=20) for start in (0, 100)]
    for each in two:
        scheduler.add(each, 0.0)
    said = {each: [] for each in two}
    for _, each, tokens in run(scheduler):
        said[each] += tokens
    assert scheduler.preemptions > 0
    for each in two:
        alone = make()
        calm = sequence(each.content.tokens[:14], max_tokens=20)
        alone.add(calm, 0.0)
        assert said[each] == [token for _, _, tokens in run(alone) for token in tokens]


@pytest.mark.parametrize("until", [0.2, 0.7, 1.5])
def test_abort_frees_every_block_at_once(until):
    """Waiting, in prefill, or decoding."""
    scheduler = make()
    sequences = [sequence(range(start, start + 50), max_tokens=100) for start in (0, 100, 200)]
    for each in sequences:
        scheduler.add(each, 0.0)
    run(scheduler, until)
    for each in sequences:
        scheduler.abort(each, until)
        scheduler.check_integrity()
    load = scheduler.load(until)
    assert (load.waiting, load.running, load.kv_used) == (0, 0, 0.0)
    assert scheduler.next_at() is None


def test_the_next_in_line_starts_when_a_prefill_is_aborted():
    scheduler = make()
    first, second = sequence(range(50)), sequence(range(100, 150), max_tokens=1)
    scheduler.add(first, 0.0)
    scheduler.add(second, 0.0)
    scheduler.abort(first, 0.2)
    assert scheduler.next_at() == pytest.approx(0.7)


def test_a_sequence_knows_on_arrival_what_it_will_compute():
    scheduler = make()
    scheduler.add(sequence(range(50), max_tokens=1), 0.0)
    run(scheduler)
    new, hit = sequence(range(200, 210), max_tokens=1), sequence(range(50), max_tokens=1)
    scheduler.add(new, 1.0)
    scheduler.add(hit, 1.0)
    assert (new.expected_tokens, hit.expected_tokens) == (10, 2)


def test_rates_are_measured_on_the_clock_and_not_read_from_the_model():
    scheduler = make()
    scheduler.add(sequence(range(50), max_tokens=11), 0.0)
    assert scheduler.load(0.0).prefill_rate == scheduler.load(0.0).decode_rate == 0
    scheduler.advance(0.5)
    assert scheduler.load(0.5).prefill_rate == pytest.approx(100)
    # The caller comes late: ten steps of 0.1 s took two seconds.
    scheduler.advance(2.5)
    assert scheduler.load(2.5).decode_rate == pytest.approx(5)


def test_coming_late_gives_all_that_was_due_in_one_output():
    scheduler = make()
    only = sequence(range(50), max_tokens=8)
    scheduler.add(only, 0.0)
    assert scheduler.advance(60.0) == [only]
    assert len(only.take().token_ids) == 8


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_any_traffic_is_served_in_full_and_leaves_nothing(seed):
    rng = random.Random(seed)
    scheduler = make(blocks=12, max_running=rng.randint(1, 5), decode_slowdown=0.1)
    now, alive, lengths = 0.0, [], {}
    for _ in range(60):
        now += rng.random() / 5
        if rng.random() < 0.5:
            each = sequence([rng.randint(0, 1)] * rng.randint(1, 24), rng.randint(1, 20), now)
            scheduler.add(each, now)
            alive.append(each)
        elif alive and rng.random() < 0.3:
            scheduler.abort(alive.pop(rng.randrange(len(alive))), now)
        for each in scheduler.advance(now):
            lengths[each] = lengths.get(each, 0) + len(each.take().token_ids)
        scheduler.check_integrity()
    for each in scheduler.advance(1e9):
        lengths[each] = lengths.get(each, 0) + len(each.take().token_ids)
    assert all(lengths[each] == each.sampling.max_tokens for each in alive)
    assert scheduler.next_at() is None
    assert scheduler.load(1e9).kv_used == 0
    scheduler.check_integrity()
