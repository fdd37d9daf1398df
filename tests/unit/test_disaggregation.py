"""Whether a prompt is computed by one replica and answered by another, by predicted seconds and by configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.candidates import Candidate, Candidates
from router.choice import RouteRequest
from router.disaggregation import InHalves, split
from router.prefill_config import PrefillConfig
from router.speed import PRIOR, Speed

P, D = 0, 1
LONG, SHORT = 3000, 60


def speed(**figures: Any) -> dict[str, Any]:
    """Of a CPU engine, in the orders of magnitude of a small model."""
    slow = {
        "prefill_token_s": 1 / 400,
        "decode_step_s": 0.04,
        "decode_stream_s": 0.002,
        "transfer_token_s": 1 / 25_000,
    }
    return PRIOR.named() | slow | figures


def pool(prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None) -> Candidates:
    return Candidates.of(
        [
            Candidate("p", **{"prefill_role": True, "speed": speed()} | (prefill or {})),
            Candidate("d", **{"speed": speed()} | (decode or {})),
        ]
    )


def verdict(
    tokens: int, candidates: Candidates, whole: int = D, can: bool = True, **config: Any
) -> tuple[InHalves | None, str]:
    request = RouteRequest("r", tokens, 100)
    return split(request, candidates, whole, lambda source, target: can, PrefillConfig(**config))


def test_a_long_prompt_leaves_the_streams_of_others_alone() -> None:
    halves, reason = verdict(LONG, pool(decode={"running": 16}))
    assert reason == "gain"
    assert halves is not None
    assert (halves.prefill, halves.decode, halves.ship_tokens) == (P, D, LONG)
    assert halves.gain_s > 0


@pytest.mark.parametrize("tokens", [SHORT, LONG])
@pytest.mark.parametrize("running", [0, 1, 16])
def test_between_replicas_that_are_equally_busy_nothing_is_gained(tokens: int, running: int) -> None:
    assert verdict(tokens, pool(prefill={"running": running}, decode={"running": running}))[1] == "no_gain"


def test_a_short_prompt_is_not_worth_the_way() -> None:
    assert verdict(4, pool(decode={"running": 4}))[1] == "no_gain"


def test_where_nobody_is_disturbed_nothing_is_gained() -> None:
    assert verdict(LONG, pool())[1] == "no_gain"


def test_a_prefix_that_is_there_makes_it_a_short_prompt() -> None:
    assert verdict(LONG, pool(decode={"running": 16, "matched": LONG - 4}))[1] == "no_gain"


def test_a_queue_at_the_prefill_pool_sends_it_back() -> None:
    busy = {"pending": 20 * LONG, "waiting": 20}
    assert verdict(LONG, pool(prefill=busy, decode={"running": 16}))[1] == "no_gain"


def test_a_slow_way_sends_it_back() -> None:
    slow = speed(transfer_token_s=0.1)
    assert verdict(LONG, pool(decode={"running": 16, "speed": slow}))[1] == "no_gain"


@pytest.mark.parametrize("change", [{"draining": True}, {"prefill_role": False}])
def test_without_a_prefill_replica_that_is_there_none_is_used(change: dict[str, Any]) -> None:
    assert verdict(LONG, pool(prefill=change, decode={"running": 16})) == (None, "no_prefill")


def test_replicas_that_do_not_fit_are_not_paired() -> None:
    assert verdict(LONG, pool(decode={"running": 16}), can=False) == (None, "no_prefill")


def test_of_several_the_one_with_the_prefix_computes_and_the_emptier_one_answers() -> None:
    rows = [
        Candidate("p0", prefill_role=True, speed=speed()),
        Candidate("p1", prefill_role=True, speed=speed(), matched=LONG // 2),
        Candidate("d0", running=16, speed=speed()),
        Candidate("d1", running=3, speed=speed()),
    ]
    halves, _ = verdict(LONG, Candidates.of(rows), whole=2)
    assert halves is not None
    assert (halves.prefill, halves.decode) == (1, 3)


def test_one_that_does_not_fit_gives_way_to_the_next() -> None:
    rows = [
        Candidate("p0", prefill_role=True, speed=speed()),
        Candidate("p1", prefill_role=True, pending=100, waiting=1, speed=speed()),
        Candidate("d", running=16, speed=speed()),
    ]
    request = RouteRequest("r", LONG, 100)
    found = split(request, Candidates.of(rows), 2, lambda source, target: source == "p1", PrefillConfig())
    assert found.halves is not None
    assert found.halves.prefill == 1


@pytest.mark.parametrize(
    ("config", "tokens", "reason", "halved"),
    [
        ({"when": "never"}, LONG, "never", False),
        ({"when": "always"}, SHORT, "always", True),
        ({"min_tokens": 1000}, LONG, "min_tokens", True),
        ({"min_tokens": 1000}, SHORT, "short", False),
    ],
)
def test_a_configuration_overrides_the_prediction(
    config: dict[str, Any], tokens: int, reason: str, halved: bool
) -> None:
    halves, why = verdict(tokens, pool(), **config)
    assert (why, halves is not None) == (reason, halved)


def test_only_what_lacks_at_the_replica_that_answers_counts_against_the_threshold() -> None:
    assert verdict(LONG, pool(decode={"matched": LONG - 10}), min_tokens=1000)[1] == "short"


@given(st.integers(1, 20_000), st.integers(0, 32), st.integers(0, 50_000), st.floats(0, 1))
def test_more_weight_on_streams_never_takes_a_prompt_back(
    tokens: int, running: int, pending: int, weight: float
) -> None:
    candidates = pool(prefill={"pending": pending, "waiting": 1}, decode={"running": running})
    less, _ = verdict(tokens, candidates, stall_weight=weight)
    more, _ = verdict(tokens, candidates, stall_weight=2 * weight)
    assert less is None or more is not None


def test_it_reads_the_candidates_and_changes_none() -> None:
    candidates = pool(decode={"running": 16})
    before = replace(candidates, speed=Speed(candidates.speed.table.copy())).rows()
    verdict(LONG, candidates)
    assert candidates.rows() == before
