"""Reading a streamed answer, however the network cuts it."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.bench import answer as answers
from cluster.bench import sse
from cluster.bench.answer import AnswerError, StreamedAnswer
from cluster.bench.sse import EventParser, EventTooLongError

payloads = st.lists(
    st.text(st.characters(blacklist_characters="\r\n", blacklist_categories=["Cs"]), min_size=1).map(
        str.encode
    ),
    max_size=8,
)


def chunk(text: str = "a", finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return b"data: " + msgspec.json.encode({"choices": [choice], **more}) + b"\n\n"


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = None if cached is None else {"cached_tokens": cached}
    counted = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return b"data: " + msgspec.json.encode({"choices": [], "usage": counted}) + b"\n\n"


DONE = b"data: [DONE]\n\n"


@settings(deadline=None)
@given(payloads, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.lists(st.integers(0, 400), max_size=12))
def test_events_are_the_same_wherever_the_stream_is_cut(
    parts: list[bytes], end: bytes, cuts: list[int]
) -> None:
    stream = b"".join(b"data: " + part + end + end for part in parts)
    parser, got = EventParser(), list[bytes]()
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for begin, stop in itertools.pairwise(places):
        got += parser.feed(stream[begin:stop])
    assert got == parts
    assert not parser.pending


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 300))
def test_any_bytes_give_the_same_events_in_one_piece_or_two(data: bytes, cut: int) -> None:
    whole, halves = EventParser(), EventParser()
    in_two = halves.feed(data[:cut]) + halves.feed(data[cut:])
    # A CR at the cut may end an event that the LF after it belongs to; the data is the same.
    assert in_two == whole.feed(data)


def test_a_piece_may_hold_several_events_and_half_a_one() -> None:
    parser = EventParser()
    assert parser.feed(b"data: 1\n\ndata: 2\n\nda") == [b"1", b"2"]
    assert parser.pending
    assert parser.feed(b"ta: 3\n\n") == [b"3"]


def test_comments_and_other_fields_are_passed_over_and_lines_of_data_joined() -> None:
    stream = b": ping\n\nevent: x\nid: 1\n\nevent: y\ndata: a\ndata:b\n\n"
    assert EventParser().feed(stream) == [b"a\nb"]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    parser = EventParser()
    parser.feed(b"data: " + b"x" * 90)
    with pytest.raises(EventTooLongError):
        parser.feed(b"x" * 10)


def test_every_chunk_with_a_choice_is_timed_and_usage_counts_the_tokens() -> None:
    answer = StreamedAnswer(sent=10.0)
    assert answer.feed(chunk(""), 10.5) == 1
    assert answer.feed(chunk("he") + chunk("llo", "length"), 10.75) == 2
    assert answer.feed(usage(7, 5, cached=4) + DONE, 11.0) == 0
    answer.finish()
    assert list(answer.token_s) == [0.5, 0.75, 0.75]
    assert answer.text == "hello"
    assert (answer.input_tokens, answer.output_tokens, answer.cached_tokens) == (7, 5, 4)


def test_without_usage_chunks_are_counted() -> None:
    answer = StreamedAnswer(0.0)
    answer.feed(chunk() + chunk() + DONE, 1.0)
    answer.finish()
    assert (answer.input_tokens, answer.output_tokens, answer.cached_tokens) == (None, 2, None)


def test_text_of_completions_is_read_too() -> None:
    answer = StreamedAnswer(0.0)
    answer.feed(b'data: {"choices":[{"text":"ab","finish_reason":"stop"}],"usage":null}\n\n', 1.0)
    answer.finish()
    assert answer.text == "ab"


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (DONE, "without a token"),
        (b"", "without a token"),
        (chunk() + chunk(), "after 2 chunks without a finish_reason"),
    ],
)
def test_an_answer_that_was_cut_is_an_error(stream: bytes, said: str) -> None:
    answer = StreamedAnswer(0.0)
    answer.feed(stream, 1.0)
    with pytest.raises(AnswerError, match=said):
        answer.finish()


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (b'data: {"error": {"message": "engine died", "code": 500}}\n\n', "engine died"),
        (b"data: <html>\n\n", "no chunk"),
        (b'data: {"choices": 1}\n\n', "no chunk"),
    ],
)
def test_what_is_no_chunk_is_an_error_that_says_what_came(stream: bytes, said: str) -> None:
    with pytest.raises(AnswerError, match=said):
        StreamedAnswer(0.0).feed(stream, 1.0)


def test_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWER_BYTES", 200)
    answer = StreamedAnswer(0.0)
    answer.feed(chunk(), 1.0)
    with pytest.raises(AnswerError, match="more than 200 bytes"):
        answer.feed(chunk() * 5, 1.0)
