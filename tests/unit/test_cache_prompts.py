"""What `manta cache` makes of prompts that it is given."""

from __future__ import annotations

import io
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cluster.cache_prompts import Failed, InputError, Line, Summary, name_chunks, parse_prompts, read_prompts
from cluster.cache_tables import progress, size
from router.cache_answers import Warmed


def test_lines_of_json_are_bodies_and_their_numbers_are_those_of_the_file() -> None:
    found = parse_prompts('\n{"prompt": "a"}\r\n\n{"messages": []}\n')
    assert found.lines == [Line(2, {"prompt": "a"}), Line(4, {"messages": []})]
    assert found.failed == []


def test_lines_of_text_are_prompts_or_messages() -> None:
    assert parse_prompts("one\n\ntwo  \n").lines == [Line(1, {"prompt": "one"}), Line(3, {"prompt": "two  "})]
    (line,) = parse_prompts("one", chat=True).lines
    assert line.body == {"messages": [{"role": "user", "content": "one"}]}


def test_the_first_line_tells_the_form_unless_the_name_of_the_file_does(tmp_path: Path) -> None:
    text = 'not json\n{"prompt": "a"}\n'
    assert [line.number for line in parse_prompts(text).lines] == [1, 2]
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    found = read_prompts(file)
    assert found.lines == [Line(2, {"prompt": "a"})]
    assert found.failed == [Failed(1, "not a JSON object")]


def test_a_line_among_bodies_that_is_none_fails_alone() -> None:
    found = parse_prompts('{"prompt": "a"}\n[1]\n{"prompt"\n{"prompt": "b"}')
    assert [line.number for line in found.lines] == [1, 4]
    assert [each.line for each in found.failed] == [2, 3]


@given(st.lists(st.text(st.characters(exclude_characters="\n\r", exclude_categories=("Cs",)))))
def test_no_other_character_ends_a_line(texts: list[str]) -> None:
    found = parse_prompts("\n".join(texts), jsonl=False)
    assert [line.body["prompt"] for line in found.lines] == [text for text in texts if text.strip()]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "found no prompts"), (b" \n\n", "found no prompts"), (b"ab\xff", "not UTF-8 .byte 2")],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    with pytest.raises(InputError, match=f"prompts.txt: {said}"):
        read_prompts(file)
    with pytest.raises(InputError, match="No such file"):
        read_prompts(tmp_path / "nowhere")


def test_chunks_are_named_in_exactly_one_way(tmp_path: Path) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"prompt": [1, 2], "model": "theirs"}')
    assert name_chunks("hi", False, None, None, "m", "red") == {"prompt": "hi", "model": "m", "tenant": "red"}
    # What the body says itself counts.
    assert name_chunks(None, False, body, None, "m", None) == {"prompt": [1, 2], "model": "theirs"}
    assert name_chunks(None, False, None, ["0a"], None, None) == {"keys": ["0a"]}
    assert name_chunks(None, False, None, None, None, None, True) == {"all": True}
    for ways in ((None, False, None, None), ("hi", False, body, None), ("hi", False, None, ["0a"])):
        with pytest.raises(InputError, match="only"):
            name_chunks(*ways, None, None)
    body.write_text("[]")
    with pytest.raises(InputError, match="needed: a JSON object"):
        name_chunks(None, False, body, None, None, None)


def test_a_summary_adds_up_and_is_json() -> None:
    summary = Summary(failed=[Failed(3, "400: no")])
    summary.add(Warmed("r", 100, {"hbm": 64, "dram": 0}, 36, 2, 1))
    summary.add(Warmed("r", 50, {"dram": 32}, 18, 1, 1))
    assert msgspec.json.decode(msgspec.json.encode(summary)) == {
        "prompts": 2,
        "prompt_tokens": 150,
        "computed": 54,
        "cached": {"hbm": 64, "dram": 32},
        "chunks": 3,
        "stored": 2,
        "failed": [{"line": 3, "problem": "400: no"}],
    }


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (300 << 20, "300 MiB"), (5 << 50, "5120 TiB")],
)
def test_sizes_are_short(count: int, shown: str) -> None:
    assert size(count) == shown


def test_the_bar_follows_the_summary_on_a_terminal_and_is_nothing_in_a_pipe() -> None:
    for terminal in (True, False):
        out, summary = io.StringIO(), Summary()
        console = Console(file=out, force_terminal=terminal, width=120)
        with progress(console, 2, summary) as advance:
            summary.add(Warmed("r", 100, {}, 77, 1, 1))
            advance()
            summary.failed.append(Failed(2, "no"))
            advance()
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
        assert ("2/2 77 tokens computed, 1 failed" in shown) == terminal
        assert bool(shown.strip()) == terminal
