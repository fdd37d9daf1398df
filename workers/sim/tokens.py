"""The simulated engine's tokenizer and chat template, shared with the router's renderer.

A text is its UTF-8 cut into pieces of four bytes, the last one shorter; a token id is the piece read as a
little-endian uint32, padded with zeros. Every message of a chat is cut for itself, so that a longer chat
starts with the tokens of the shorter one, and an answer as a message has the tokens that it was made of.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

TOKEN_BYTES = 4
VOCABULARY = 1 << 32

# NUL pads the last piece, so a NUL of the text is kept as a byte that UTF-8 never contains.
_NUL, _NUL_IN_TEXT = b"\x00", b"\xff"


class RenderError(ValueError):
    """Messages that the chat template can't render. The message names the field."""


class RenderedPrompt(NamedTuple):
    tokens: array[int]
    """uint32, typecode "I"."""
    shareable: int
    """Leading tokens whose KV the tokens alone determine; all of them where there is no image or sound."""
    media: tuple[tuple[int, bytes], ...] = ()
    """Images and sounds: token position and digest of each."""


def encode(text: str) -> array[int]:
    """Token ids of `text`. A lone surrogate, which UTF-8 can't express, becomes a question mark."""
    data = text.encode("utf-8", "replace").replace(_NUL, _NUL_IN_TEXT)
    tokens = array("I")
    tokens.frombytes(data + bytes(-len(data) % TOKEN_BYTES))
    return tokens


def decode(ids: Sequence[int]) -> str:
    """Inverse of `encode`, also over several encodings in a row. Bytes that are no UTF-8 become U+FFFD.

    Raises ValueError for an id outside the vocabulary.
    """
    try:
        data = array("I", ids).tobytes()
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to {VOCABULARY - 1}: {error}") from error
    return data.replace(_NUL, b"").replace(_NUL_IN_TEXT, _NUL).decode("utf-8", "replace")


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> RenderedPrompt:
    """The prompt of a chat: `<|role|>\\n{text}\\n` for every message, then `<|assistant|>\\n`.

    `continue_final_message` leaves the last message open instead. Raises RenderError for messages that are
    empty or not of OpenAI's shape.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RenderError("messages: found none; needed: a list of at least one message")
    renderer = _Renderer()
    if tools:
        renderer.text(f"<|tools|>\n{_compact(tools)}\n")
    for index, message in enumerate(messages):
        renderer.message(index, message)
        if not (continue_final_message and index == len(messages) - 1):
            renderer.text("\n")
    if add_generation_prompt and not continue_final_message:
        renderer.text("<|assistant|>\n")
    return renderer.finish()


class _Renderer:
    """Collects the pieces of one prompt."""

    def __init__(self) -> None:
        self._tokens = array("I")
        self._media: list[tuple[int, bytes]] = []

    def text(self, text: str) -> None:
        self._tokens.extend(encode(text))

    def message(self, index: int, message: Mapping[str, Any]) -> None:
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RenderError(f"{where}: found {type(message).__name__}; needed: an object")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RenderError(f"{where}.role: found {role!r}; needed: a string")
        self.text(f"<|{role}|>\n")
        self._content(where, message.get("content"))
        if message.get("tool_calls"):
            self.text(_compact(message["tool_calls"]))

    def finish(self) -> RenderedPrompt:
        shareable = self._media[0][0] if self._media else len(self._tokens)
        return RenderedPrompt(self._tokens, shareable, tuple(self._media))

    def _content(self, where: str, content: Any) -> None:
        if content is None:
            return
        if isinstance(content, str):
            self.text(content)
            return
        if not isinstance(content, list):
            raise RenderError(
                f"{where}.content: found {type(content).__name__}; needed: a string or a list of parts"
            )
        texts: list[str] = []
        for number, part in enumerate(content):
            text = _part_text(f"{where}.content[{number}]", part)
            if text is not None:
                texts.append(text)
                continue
            self.text("".join(texts))
            texts.clear()
            self._medium(part)
        self.text("".join(texts))

    def _medium(self, part: Mapping[str, Any]) -> None:
        digest = hashlib.sha256(_compact(part).encode("utf-8", "replace")).digest()
        self._media.append((len(self._tokens), digest))
        self.text(f"<|{part['type']}|>")


def _part_text(where: str, part: Any) -> str | None:
    """Text of a part; None for a part that is something else than text."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise RenderError(f"{where}: needed: an object with a `type`")
    if part["type"] in ("text", "input_text", "output_text", "refusal"):
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(text, str):
            raise RenderError(f"{where}.text: found {type(text).__name__}; needed: a string")
        return text
    return None


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
