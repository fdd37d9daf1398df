"""The decision log: the last decisions, whole enough to take them again."""

from __future__ import annotations

import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.events import ChunkKey
from router.candidates import Candidate, Candidates
from router.decision_log import (
    Decision,
    DecisionLog,
    DecisionLogError,
    Measured,
    dump,
    keys_digest,
    load,
    replay,
)
from router.ledger import Ledger
from router.loadable import Loadable
from router.policies import PredictedTtftPolicy, RoundRobinPolicy, RouteRequest

POLICY = PredictedTtftPolicy()
KEYS = [ChunkKey(bytes([number]) * 32) for number in range(3)]
MEASURED = Measured(status=200, cached_tokens=512, ttft_s=0.25, total_s=1.5)


def record(log: DecisionLog, ledger: Ledger, draw: random.Random) -> int:
    """One decision over four replicas, of which some hold a part of the prompt."""
    request = RouteRequest(f"request-{draw.random()}", draw.randint(1, 4000), draw.choice([None, 128]))
    rows = []
    for name in "abcd":
        own = ledger.load(name)
        rows.append(
            Candidate(
                name,
                matched=256 * draw.randint(0, 4),
                loadable=Loadable(draw.choice([0, 256]), 0, draw.choice([0, 512]), 0),
                pending=own.prefill_tokens,
                waiting=own.prefilling,
                running=own.running,
                kv_used=draw.random(),
                last_chosen=own.last_chosen,
            )
        )
    candidates = Candidates.of(rows)
    choice = POLICY.choose(request, candidates)
    assert choice is not None
    ledger.reserve(choice.replica, request.request_id, request.prompt_tokens)
    return log.record(request, KEYS, candidates, choice)


def recorded(decisions: int, capacity: int = 1000) -> DecisionLog:
    log, ledger, draw = DecisionLog(capacity, clock=lambda: 1_700_000_000.5), Ledger(), random.Random(7)
    for _ in range(decisions):
        record(log, ledger, draw)
    return log


def dumped(log: DecisionLog) -> io.BytesIO:
    stream = io.BytesIO()
    dump(log, stream)
    stream.seek(0)
    return stream


def test_a_decision_keeps_what_was_known_and_chosen() -> None:
    log = DecisionLog(10, clock=lambda: 1_700_000_000.5)
    request, rows = RouteRequest("r1", 700), [Candidate("a"), Candidate("b", matched=512)]
    choice = POLICY.choose(request, Candidates.of(rows))
    number = log.record(request, KEYS, Candidates.of(rows), choice)
    assert log.measure(number, MEASURED)
    assert list(log) == [
        Decision(
            number=1,
            time=1_700_000_000.5,
            request=request,
            chunks=3,
            digest=keys_digest(KEYS),
            candidates=tuple(rows),
            choice=choice,
            measured=MEASURED,
        )
    ]


def test_the_digest_names_the_whole_chain() -> None:
    assert keys_digest(KEYS) == keys_digest(KEYS[-1:])
    assert keys_digest(KEYS) != keys_digest(KEYS[:2])
    assert keys_digest([]) == ""
    assert len(keys_digest(KEYS)) == 16


@given(capacity=st.integers(1, 8), decisions=st.integers(0, 30), measured=st.integers(1, 30))
def test_the_log_holds_the_last_decisions(capacity: int, decisions: int, measured: int) -> None:
    log = recorded(decisions, capacity)
    log.check_integrity()
    kept = list(range(max(1, decisions - capacity + 1), decisions + 1))
    assert [decision.number for decision in log] == kept
    assert log.measure(measured, MEASURED) == (measured in kept), (
        "a measurement never lands on another decision"
    )
    assert [d.number for d in log if d.measured] == ([measured] if measured in kept else [])
    log.check_integrity()


def test_decisions_among_many_replicas_take_the_room_of_several() -> None:
    log = DecisionLog(100, clock=lambda: 0.0, max_rows=10)
    four, twelve = (Candidates.of([Candidate(str(row)) for row in range(count)]) for count in (4, 12))
    for candidates, kept in ((four, [1]), (four, [1, 2]), (four, [2, 3]), (twelve, [4]), (four, [5])):
        log.record(RouteRequest("r", 10), KEYS, candidates, None)
        log.check_integrity()
        assert [decision.number for decision in log] == kept


def test_what_was_predicted_stands_next_to_what_was_measured() -> None:
    log = recorded(1)
    log.measure(1, Measured(200, 512, ttft_s=0.25, total_s=1.5, served_s=0.2))
    (decision,) = load(dumped(log))
    assert decision.choice is not None
    assert decision.choice.predicted is not None
    assert decision.choice.predicted.ttft_s > 0
    assert decision.measured is not None
    assert decision.measured.served_s == 0.2


def test_a_log_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="is 0; needed: 1 or more"):
        DecisionLog(0, clock=lambda: 0.0)


def test_a_dump_loads_to_equal_decisions() -> None:
    log = recorded(20)
    log.measure(3, MEASURED)
    log.record(RouteRequest("refused", 10), [], Candidates.of([]), None)
    assert load(dumped(log)) == list(log)


def test_a_loaded_log_replays_to_the_choices_that_were_taken() -> None:
    log = recorded(200)
    decisions = load(dumped(log))
    again = replay(decisions, PredictedTtftPolicy())
    assert again == [decision.choice for decision in log]
    assert len({choice.replica for choice in again if choice}) == 4


def test_another_policy_can_be_tried_on_a_log() -> None:
    decisions = list(recorded(200))
    other = [choice.replica for choice in replay(decisions, RoundRobinPolicy()) if choice]
    taken = [decision.choice.replica for decision in decisions if decision.choice]
    assert len(other) == len(taken)
    assert other != taken


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b'{"format":"manta-decisions","version":99}\n',
            "line 1: found manta-decisions 99, needed manta-decisions 2",
        ),
        (b'{"number":1}\n', "line 1: .*format"),
        (b'{"format":"manta-decisions","version":2}\n{"number":"one"}\n', "line 2: "),
        (b'{"format":"manta-decisions","version":2}\n\n{"numb', "line 3: "),
    ],
)
def test_a_broken_dump_is_refused_with_its_line(data: bytes, message: str) -> None:
    with pytest.raises(DecisionLogError, match=message):
        load(io.BytesIO(data))
