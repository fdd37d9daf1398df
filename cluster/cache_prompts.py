"""Prompts as `manta cache` is given them, and what came of warming them."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from router.cache_answers import Warmed

_JSONL = frozenset({".jsonl", ".ndjson"})


class InputError(ValueError):
    """What was given can't be used. The message says where and what is needed."""


class Line(NamedTuple):
    """One line of the file that asks for something."""

    number: int
    """From 1."""
    body: dict[str, Any]
    """Of a completion or a chat."""


class Failed(msgspec.Struct, frozen=True, order=True):
    line: int
    problem: str


class Prompts(NamedTuple):
    lines: list[Line]
    failed: list[Failed]
    """Lines that ask for nothing that can be sent."""


@dataclass
class Summary:
    """What came of the lines so far."""

    prompts: int = 0
    """Warmed."""
    prompt_tokens: int = 0
    computed: int = 0
    cached: Counter[str] = field(default_factory=Counter)
    """Tokens by tier."""
    chunks: int = 0
    """Of all prompts; one that several of them begin with counts for each."""
    stored: int = 0
    failed: list[Failed] = field(default_factory=list)

    def add(self, warmed: Warmed) -> None:
        self.prompts += 1
        self.prompt_tokens += warmed.prompt_tokens
        self.computed += warmed.computed
        self.cached.update(warmed.cached)
        self.chunks += warmed.chunks
        self.stored += warmed.stored


def name_chunks(
    prompt: str | None,
    chat: bool,
    body: Path | None,
    keys: list[str] | None,
    model: str | None,
    tenant: str | None,
    everything: bool = False,
) -> dict[str, Any]:
    """The body of a question about chunks, named in one of these ways. What is wrong inside it, the cluster says.

    Raises InputError.
    """
    if sum([prompt is not None, body is not None, bool(keys), everything]) != 1:
        raise InputError("say which chunks: by a PROMPT, by --body or by --key, and by one of these only")
    about = {"model": model, "tenant": tenant}
    given: dict[str, Any] = {field: value for field, value in about.items() if value is not None}
    if prompt is not None:
        return given | text_body(prompt, chat)
    if body is not None:
        return given | _json_object(body)
    return given | ({"keys": keys} if keys else {"all": True})


def _json_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(_read(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: {error}; needed: a JSON object") from error


def _read(path: Path) -> str:
    """`-` is the standard input. Raises InputError."""
    try:
        return (sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()).decode()
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 (byte {error.start})") from error


def read_prompts(path: Path, chat: bool = False) -> Prompts:
    """As `parse_prompts`. Raises InputError, also for a file that has none."""
    prompts = parse_prompts(_read(path), True if path.suffix in _JSONL else None, chat)
    if not prompts.lines and not prompts.failed:
        raise InputError(f"{path}: found no prompts; needed: one a line")
    return prompts


def parse_prompts(text: str, jsonl: bool | None = None, chat: bool = False) -> Prompts:
    """JSON bodies of requests, one a line, or a prompt a line. Empty lines are none.

    `jsonl`: which of the two; None to tell by the first line. `chat`: a line of text is a user's message, not the
    prompt of a completion.
    """
    # Not splitlines: other characters that it takes for ends of lines may stand inside a prompt.
    split = (line.removesuffix("\r") for line in text.split("\n"))
    lines = [(number, line) for number, line in enumerate(split, 1) if line.strip()]
    if jsonl is None:
        jsonl = bool(lines) and isinstance(_parsed(lines[0][1]), dict)
    if not jsonl:
        return Prompts([Line(number, text_body(line, chat)) for number, line in lines], [])
    found = Prompts([], [])
    for number, line in lines:
        body = _parsed(line)
        if isinstance(body, dict):
            found.lines.append(Line(number, body))
        else:
            found.failed.append(Failed(number, "not a JSON object"))
    return found


def _parsed(line: str) -> Any:
    try:
        return msgspec.json.decode(line.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def text_body(line: str, chat: bool) -> dict[str, Any]:
    """The body of a completion or a chat with this text."""
    return {"messages": [{"role": "user", "content": line}]} if chat else {"prompt": line}
