"""YAML with comments, for files that a person goes on editing."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

WIDTH = 110
_STEP = "  "


class Note(str):
    """A comment: as a key of a mapping (whatever its value) or an item of a list, it stands before what follows it.

    Its lines are filled anew to paragraphs; those that begin with a blank stay as they are. One that begins with a
    newline, or is empty, leaves an empty line before it.
    """

    __slots__ = ()


def render(data: dict[Any, Any]) -> str:
    """`yaml.safe_load(render(data)) == plain(data)`. Values are what JSON has; texts of many lines keep them."""
    return "".join(line.rstrip() + "\n" for line in _mapping(data, ""))


def plain(data: Any) -> Any:
    """Without the notes."""
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items() if not isinstance(key, Note)}
    if isinstance(data, list):
        return [plain(item) for item in data if not isinstance(item, Note)]
    return data


def _mapping(data: dict[Any, Any], pad: str) -> Iterator[str]:
    for key, value in data.items():
        if isinstance(key, Note):
            yield from _note(key, pad)
        else:
            yield from _entry(f"{pad}{_scalar(key)}:", value, pad)


def _sequence(items: list[Any], pad: str) -> Iterator[str]:
    for item in items:
        if isinstance(item, Note):
            yield from _note(item, pad)
        elif plain(item) and isinstance(item, dict | list):
            lines = list(
                _mapping(item, pad + _STEP) if isinstance(item, dict) else _sequence(item, pad + _STEP)
            )
            first = next(
                i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")
            )
            # Notes of the first key: deeper, they would be taken for lines of a text before them.
            yield from (line.removeprefix(_STEP) for line in lines[:first])
            yield f"{pad}- {lines[first].lstrip()}"
            yield from lines[first + 1 :]
        else:
            yield from _entry(f"{pad}-", item, pad)


def _entry(lead: str, value: Any, pad: str) -> Iterator[str]:
    """`lead` and its value: on the same line, or indented below it."""
    if isinstance(value, dict | list) and value:
        if plain(value):
            yield lead
        else:
            # Comments alone would make a null of it.
            yield f"{lead} {_scalar(plain(value))}"
        yield from _mapping(value, pad + _STEP) if isinstance(value, dict) else _sequence(value, pad + _STEP)
    elif isinstance(value, str) and _is_block(value):
        yield f"{lead} |{'' if value.endswith(chr(10)) else '-'}"
        yield from (pad + _STEP + line for line in value.splitlines())
    else:
        yield f"{lead} {_scalar(value)}"


def _is_block(value: str) -> bool:
    """Whether a literal block holds the text unchanged: printable lines, without blanks at their ends."""
    lines = value.split("\n")
    body = lines[:-1] if lines[-1] == "" else lines
    return (
        len(lines) > 1
        and all(line and line.isprintable() and line == line.rstrip() for line in body)
        and (not body[0].startswith(" "))
    )


def _scalar(value: Any) -> str:
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    text: str = yaml.safe_dump(value, width=float("inf"), default_flow_style=True, default_style=style)
    return text.removesuffix("\n").removesuffix("\n...")


def _note(note: Note, pad: str) -> Iterator[str]:
    text = str(note)
    if text.startswith("\n") or not text:
        yield ""
        text = text.removeprefix("\n")
    for paragraph in _paragraphs(text):
        lead = f"{pad}# "
        if paragraph.startswith(" ") or not paragraph:
            yield lead + paragraph
        else:
            yield from textwrap.wrap(paragraph, WIDTH, initial_indent=lead, subsequent_indent=lead)


def _paragraphs(text: str) -> Iterator[str]:
    """Lines that are one sentence after the other in one; indented and empty ones each by itself."""
    if not text:
        return
    joined: list[str] = []
    for line in text.split("\n"):
        if line and not line.startswith(" "):
            joined.append(line)
            continue
        if joined:
            yield " ".join(joined)
            joined = []
        yield line
    if joined:
        yield " ".join(joined)
