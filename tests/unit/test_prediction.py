"""Predicted seconds: queue, load and prefill of every candidate."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.candidates import Candidate, Candidates
from router.choice import RouteRequest
from router.loadable import Loadable
from router.prediction import Predicted, predict
from router.speed import FIELDS, Speed

PLAIN = Speed.of(prefill_overhead_s=0.5, prefill_token_s=0.01)


def one(prompt: int, speed: Speed = PLAIN, **fields: Any) -> Predicted:
    return predict(RouteRequest("r", prompt), Candidates.of([Candidate("a", speed=speed.named(), **fields)]))


def test_an_idle_replica_takes_the_prefill_of_what_it_lacks() -> None:
    assert one(100).ttft_s[0] == pytest.approx(1.5)
    assert one(100, matched=60).ttft_s[0] == pytest.approx(0.9)


def test_later_tokens_are_dearer_where_attention_is() -> None:
    speed = Speed.of(prefill_pair_s=0.001)
    assert one(100, speed).prefill_s[0] == pytest.approx(0.001 * 100 * 50)
    assert one(200, speed, matched=100).prefill_s[0] == pytest.approx(0.001 * 100 * 150)


def test_the_prompts_before_it_are_waited_for() -> None:
    found = one(100, pending=300, waiting=2)
    assert found.queue_s[0] == pytest.approx(1.5 * 0.5 + 3.0), "half of the first one's fixed cost is over"
    assert found.ttft_s[0] == pytest.approx(3.75 + 1.5)
    assert one(100, waiting=3).queue_s[0] == pytest.approx(2.5 * 0.5), "each prompt has its fixed cost"


def test_the_time_since_the_queue_was_counted_is_over() -> None:
    assert one(100, pending=300, waiting=2, waited_s=1.5).queue_s[0] == pytest.approx(2.25)
    assert one(100, pending=300, waiting=2, waited_s=9.0).queue_s[0] == 0


def test_half_of_the_step_under_way_is_waited_for() -> None:
    speed = Speed.of(decode_step_s=0.2, decode_stream_s=0.05)
    assert one(100, speed).queue_s[0] == 0
    assert one(100, speed, running=4).queue_s[0] == pytest.approx(0.2)


LOADS = Speed.of(
    prefill_token_s=0.01, load_token_s=(0.001, 0.002, 0.004, 0.02), load_latency_s=(0.0, 0.1, 0.1, 0.1)
)


def test_what_loads_faster_than_it_computes_is_loaded() -> None:
    found = one(1000, LOADS, matched=100, loadable=Loadable(dram=200, disk=400, remote=200))
    assert found.load_tokens[0] == 600, "the remote tier is slower than computing"
    assert found.load_s[0] == pytest.approx(0.2 + 0.1 + 1.6)
    assert found.prefill_s[0] == pytest.approx(3.0)


def test_a_latency_that_eats_up_the_gain_makes_computing_better() -> None:
    assert one(1000, LOADS, loadable=Loadable(peer=10)).load_tokens[0] == 0
    assert one(1000, LOADS, loadable=Loadable(peer=20)).load_tokens[0] == 20


def test_loading_goes_on_beside_the_queue() -> None:
    found = one(1000, LOADS, loadable=Loadable(dram=900), pending=50, waiting=1)
    assert (found.queue_s[0], found.load_s[0]) == (pytest.approx(0.5), pytest.approx(0.9))
    assert found.ttft_s[0] == pytest.approx(0.9 + 1.0)
    busier = one(1000, LOADS, loadable=Loadable(dram=900), pending=200, waiting=1)
    assert busier.ttft_s[0] == pytest.approx(2.0 + 1.0)


def test_a_prompt_is_never_loaded_to_its_last_token() -> None:
    assert one(1000, LOADS, matched=900, loadable=Loadable(dram=512)).load_tokens[0] == 99
    assert one(1000, LOADS, matched=1024, loadable=Loadable(dram=512)).load_tokens[0] == 0
    assert one(0, LOADS).ttft_s[0] == pytest.approx(0.01)


tokens = st.integers(0, 4000)
speeds = st.lists(st.floats(0, 0.1), min_size=FIELDS, max_size=FIELDS).map(
    lambda f: Speed(np.array(f)).named()
)
rows = st.builds(
    Candidate,
    id=st.just("a"),
    matched=tokens,
    loadable=st.builds(Loadable, tokens, tokens, tokens, tokens),
    pending=tokens,
    waiting=st.integers(0, 9),
    running=st.integers(0, 9),
    speed=speeds,
)


@given(row=rows, prompt=st.integers(1, 10_000))
def test_no_other_split_between_tiers_would_be_faster(row: Candidate, prompt: int) -> None:
    speed, matched = Speed.from_named(row.speed), min(row.matched, prompt - 1)
    found = predict(RouteRequest("r", prompt), Candidates.of([row]))
    least = float(found.load_s[0] + found.prefill_s[0])
    ahead = row.loadable.within(prompt - 1 - matched)
    for tier, part in product(range(4), (0.0, 0.3, 1.0)):
        taken = [*ahead[:tier], int(ahead[tier] * part), *(0 for _ in ahead[tier + 1 :])]
        load_s = sum(
            float(speed.load_token_s[at]) * count + float(speed.load_latency_s[at])
            for at, count in enumerate(taken)
            if count
        )
        held = matched + sum(taken)
        assert least <= load_s + float(speed.prefill_s(prompt - held, held)) + 1e-9


@given(several=st.lists(rows, min_size=1, max_size=6), prompt=st.integers(1, 10_000))
def test_each_candidate_is_predicted_as_if_it_were_alone(several: list[Candidate], prompt: int) -> None:
    together = predict(RouteRequest("r", prompt), Candidates.of(several))
    for at, row in enumerate(several):
        alone = predict(RouteRequest("r", prompt), Candidates.of([row]))
        assert together.row(at).ttft_s == pytest.approx(alone.row(0).ttft_s)
        assert together.load_tokens[at] == alone.load_tokens[0]


@given(several=st.lists(rows, max_size=6))
def test_rows_and_columns_say_the_same(several: list[Candidate]) -> None:
    assert Candidates.of(several).rows() == several
    if several:
        backwards = np.arange(len(several))[::-1]
        assert Candidates.of(several).take(backwards).rows() == several[::-1]
