"""Workloads of the benchmark: the same arguments give the same load, with exactly the shape that is asked for."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.bench.arrivals import arriving, request_gaps
from cluster.bench.config import Arrival, MultiTurn, RandomLengths, SharedPrefix, Target, TraceReplay
from cluster.bench.conversation import Conversation
from cluster.bench.prompts import WORDS, PromptWriter, Span
from cluster.bench.trace import TraceError, TraceRow, replay
from cluster.bench.workloads import Session, Turn, planned_requests, sessions

CHAT = Target()
TEXT = Target(endpoint="completions")
IDS = Target(endpoint="completions", prompt_form="ids")


def row(
    *, at_ms: float = 0, tokens: int = 1024, output: int = 8, blocks: tuple[int, ...] = (0, 1)
) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": list(blocks)}


def trace_file(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def common(first: list[int], second: list[int]) -> int:
    return sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )


def asked(writer: PromptWriter, session: Session) -> list[int]:
    prompt = Conversation(session, writer, IDS).ask().prompt
    assert isinstance(prompt, list)
    return [token for token in prompt if isinstance(token, int)]


def test_a_stream_is_the_same_in_every_process() -> None:
    program = "from cluster.bench.prompts import *; print(PromptWriter(7).ids([Span('a', 50), Span('b', 3)]))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[2],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {str(PromptWriter(7).ids([Span("a", 50), Span("b", 3)])).encode() + b"\n"}


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=6), st.integers(0, 3))
def test_a_prompt_has_exactly_the_tokens_of_its_spans_in_both_forms(
    spans: list[tuple[str, int]], seed: int
) -> None:
    writer, planned = PromptWriter(seed), [Span(*each) for each in spans]
    total = sum(span.tokens for span in planned)
    assert len(writer.ids(planned)) == total
    text = writer.text(planned)
    assert len(text) == 4 * total
    assert text.split() == ["".join(text[at + 1 : at + 4]) for at in range(0, len(text), 4)]


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 200))
def test_a_shorter_span_is_the_start_of_a_longer_one_whichever_is_written_first(one: int, other: int) -> None:
    writer = PromptWriter(0)
    first, second = writer.ids([Span("s", one)]), writer.ids([Span("s", other)])
    assert common(first, second) == min(one, other)


def test_ids_keep_clear_of_special_tokens_and_of_the_end_of_the_vocabulary() -> None:
    ids = PromptWriter(0, vocabulary=400).ids([Span("s", 5000)])
    assert set(ids) == set(range(100, 400))


def test_words_are_distinct_and_of_three_letters() -> None:
    assert len(set(WORDS)) == len(WORDS) > 100
    assert {len(word) for word in WORDS} == {3}


def test_conversations_have_the_turns_and_lengths_asked_for() -> None:
    workload = MultiTurn(
        conversations=3, turns=4, system_tokens=20, input_tokens=10, output_tokens=5, think_s=2
    )
    planned = list(sessions(workload, 1, planned_requests(workload, None, None)))
    assert len(planned) == 3
    assert all(session.system == Span("system", 20) for session in planned)
    for session in planned:
        assert [turn.output_tokens for turn in session.turns] == [5] * 4
        assert [sum(span.tokens for span in turn.spans) for turn in session.turns] == [10] * 4
        assert session.turns[0].think_s == 0
        assert all(turn.think_s > 0 for turn in session.turns[1:])
    assert planned == list(sessions(workload, 1, 12))
    assert planned != list(sessions(workload, 2, 12))


def test_every_turn_carries_the_whole_history_and_the_answers() -> None:
    (session,) = sessions(MultiTurn(system_tokens=2, input_tokens=3, turns=2), 0, 2)
    writer = PromptWriter(0)
    conversation = Conversation(session, writer, CHAT)
    first = conversation.ask()
    conversation.answered("so it is", 4)
    second = conversation.ask()
    assert isinstance(first.prompt, list)
    assert isinstance(second.prompt, list)
    assert [message["role"] for message in second.prompt if isinstance(message, dict)] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert second.prompt[: len(first.prompt)] == first.prompt
    assert second.prompt[2] == {"role": "assistant", "content": "so it is"}
    assert (first.input_tokens, second.input_tokens) == (5, 12)


def test_a_history_of_ids_gets_as_many_others_in_the_place_of_an_answer() -> None:
    (session,) = sessions(MultiTurn(input_tokens=3, turns=2), 0, 2)
    conversation = Conversation(session, PromptWriter(0), IDS)
    first = list(conversation.ask().prompt)
    conversation.answered("words", 7)
    second = conversation.ask()
    assert second.prompt[:3] == first
    assert len(second.prompt) == second.input_tokens == 13


@pytest.mark.parametrize("target", [CHAT, TEXT, IDS])
def test_a_turn_that_failed_leaves_no_trace_in_the_history(target: Target) -> None:
    (session,) = sessions(MultiTurn(input_tokens=3, turns=3), 0, 3)
    with_failure, without = (Conversation(each, PromptWriter(0), target) for each in (
        session, session._replace(turns=(session.turns[0], session.turns[2]))
    ))  # fmt: skip
    for conversation in (with_failure, without):
        conversation.ask()
        conversation.answered("yes", 1)
    with_failure.ask()
    with_failure.failed()
    assert with_failure.ask() == without.ask()


def test_users_of_a_group_share_exactly_its_prefix() -> None:
    workload = SharedPrefix(groups=3, users=4, prefix_tokens=50, suffix_tokens=7)
    planned = list(sessions(workload, 5, planned_requests(workload, None, None)))
    assert len({session.name for session in planned}) == len(planned) == 12
    writer = PromptWriter(5)
    prompts = {session.name: asked(writer, session) for session in planned}
    assert {len(prompt) for prompt in prompts.values()} == {57}
    for one, other in itertools.combinations(prompts, 2):
        same_group = one.split("-user-")[0] == other.split("-user-")[0]
        assert (common(prompts[one], prompts[other]) >= 50) == same_group


def test_groups_are_mixed_and_a_further_round_asks_something_new() -> None:
    workload = SharedPrefix(groups=4, users=4)
    planned = list(sessions(workload, 0, 32))
    groups = [session.name.split("-")[1] for session in planned[:16]]
    assert groups != sorted(groups)
    assert {session.name for session in planned[:16]} == {session.name for session in planned[16:]}
    assert len({session.turns for session in planned}) == 32


def test_random_lengths_stay_in_their_range_and_share_nothing() -> None:
    workload = RandomLengths(input_tokens=100, output_tokens=10, range_ratio=0.5)
    planned = list(sessions(workload, 0, 500))
    lengths = [session.turns[0].spans[0].tokens for session in planned]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(set(lengths)) > 60
    assert all(5 <= session.turns[0].output_tokens <= 15 for session in planned)
    assert len({session.turns[0].spans[0].stream for session in planned}) == 500


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 7))
def test_a_run_has_exactly_the_requests_asked_for(requests: int, turns: int) -> None:
    planned = list(sessions(MultiTurn(conversations=2, turns=turns), 0, requests))
    assert sum(len(session.turns) for session in planned) == requests


def test_without_a_number_the_workload_is_bounded_by_its_size_and_with_a_duration_by_time() -> None:
    workload = MultiTurn(conversations=3, turns=4)
    assert planned_requests(workload, None, None) == 12
    assert planned_requests(workload, 5, None) == 5
    assert planned_requests(workload, None, 60.0) is None
    assert len(list(itertools.islice(sessions(workload, 0, None), 100))) == 100


def test_equal_blocks_of_a_trace_are_equal_text_and_different_ones_are_not(tmp_path: Path) -> None:
    path = trace_file(
        tmp_path,
        row(tokens=1500, blocks=(0, 1, 2)),
        row(at_ms=500, tokens=1536, blocks=(0, 1, 3)),
        row(at_ms=2000, tokens=600, blocks=(7, 8)),
    )
    first, second, third = sessions(TraceReplay(path=path), 0)
    writer = PromptWriter(0)
    prompts = [asked(writer, session) for session in (first, second, third)]
    assert [len(prompt) for prompt in prompts] == [1500, 1536, 600]
    assert 1024 <= common(prompts[0], prompts[1]) < 1030
    assert common(prompts[0], prompts[2]) < 6
    assert [session.start_s for session in (first, second, third)] == [0, 0.5, 2]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=2, max_size=6),
    st.sampled_from([1.0, 0.25, 0.01]),
    st.integers(1, 512),
)
def test_a_scaled_trace_shares_as_many_blocks_as_the_trace(
    blocks: list[list[int]], scale: float, last: int
) -> None:
    rows = [TraceRow(0, 512 * (len(ids) - 1) + last, 100, ids) for ids in blocks]
    replayed = list(replay(rows, 1.0, scale))
    block = max(1, round(512 * scale))
    for (a, one), (b, other) in itertools.combinations(zip(blocks, replayed, strict=True), 2):
        full = min(len(a), len(b)) - 1
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
        same = sum(
            1 for _ in itertools.takewhile(lambda p: p[0] == p[1], zip(one.spans, other.spans, strict=False))
        )
        assert same >= min(shared, full)
        assert all(span.tokens == block for span in one.spans[:-1])


def test_scaling_shortens_times_and_lengths_and_long_prompts_are_cut(tmp_path: Path) -> None:
    path = trace_file(
        tmp_path, row(at_ms=1000, tokens=5120, output=100, blocks=tuple(range(10))), row(at_ms=3000)
    )
    first, second = sessions(
        TraceReplay(path=path, time_scale=0.5, length_scale=0.1, max_input_tokens=300), 0
    )
    assert (first.start_s, second.start_s) == (0, 1)
    assert sum(span.tokens for span in first.turns[0].spans) == 300
    assert first.turns[0].output_tokens == 10
    assert sum(span.tokens for span in second.turns[0].spans) == 102


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"timestamp": 0}', "line 2: Object missing required field"),
        ("not json", "line 2: JSON is malformed"),
        (json.dumps(row(tokens=1025)), "input_length is 1025 with 2 hash_ids"),
    ],
)
def test_a_bad_row_of_a_trace_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = trace_file(tmp_path, row())
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(TraceError, match=said):
        list(sessions(TraceReplay(path=path), 0))


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.jsonl: can't be read: No such file"):
        list(sessions(TraceReplay(path=tmp_path / "nowhere.jsonl"), 0))


@settings(deadline=None)
@given(st.integers(1, 300), st.floats(0.1, 500), st.floats(0.2, 5), st.integers(0, 99))
def test_gaps_of_a_known_number_of_requests_add_up_to_the_rate(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    gaps = request_gaps(random.Random(seed), rate, burstiness, count)
    assert len(gaps) == count
    assert min(gaps) >= 0
    assert sum(gaps) == pytest.approx(count / rate)


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    """The variation coefficient of a gamma distribution is one over the root of its shape."""
    for burstiness in (0.25, 1.0, 4.0):
        gaps = request_gaps(random.Random(1), 10, burstiness, 20_000)
        mean = sum(gaps) / len(gaps)
        deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
        assert deviation / mean == pytest.approx(burstiness**-0.5, rel=0.05)


def test_infinite_burstiness_is_an_even_beat() -> None:
    assert request_gaps(random.Random(0), 4, float("inf"), 3) == pytest.approx([0.25] * 3)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert request_gaps(random.Random(0), float("inf"), 1.0, 3) == [0.0, 0.0, 0.0]


def test_sessions_of_several_turns_come_at_the_rate_of_their_requests() -> None:
    arrival = Arrival(kind="poisson", rate=10, burstiness=float("inf"))
    planned = [Session(str(number), (Turn((), 1),) * 4) for number in range(5)]
    for requests in (20, None):
        times = [each.at_s for each in arriving(planned, arrival, 0, requests)]
        assert times == pytest.approx([0.1, 0.5, 0.9, 1.3, 1.7])


def test_arrivals_without_a_known_number_go_on_and_never_run_backwards() -> None:
    endless = sessions(RandomLengths(), 0, None)
    times = [
        each.at_s
        for each in itertools.islice(arriving(endless, Arrival(kind="poisson", rate=50), 3, None), 5000)
    ]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(100, rel=0.1)
