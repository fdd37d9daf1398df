"""`SimRenderer`: the simulated engine's chat template and tokenizer, with the checks that vLLM makes."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any, NamedTuple

from router import errors
from router.render import (
    CHAT_PATH,
    DEFAULT_COMPLETION_TOKENS,
    RENDERED_PATHS,
    Rendered,
    check_messages,
    parse_object,
    untouched,
)
from workers.sim.tokens import RenderError, encode, render_chat

SMALL_BODY_BYTES = 64 * 1024
"""Rendering a body up to this size takes less time than handing it to a thread."""


class _Prompt(NamedTuple):
    tokens: array[int]
    shareable: int


class SimRenderer:
    """See `router.render.Renderer`. `max_model_len` is the longest prompt in tokens."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len

    async def start(self) -> None: ...

    async def render(self, path: str, body: bytes) -> Rendered:
        if path not in RENDERED_PATHS:
            return untouched(body, "path")
        if len(body) <= SMALL_BODY_BYTES:
            return self._render(path, body)
        return await asyncio.to_thread(self._render, path, body)

    def _render(self, path: str, body: bytes) -> Rendered:
        fields = parse_object(body)
        if path != CHAT_PATH and fields.get("prompt_embeds") is not None:
            return untouched(body, "prompt_embeds")
        prompts = _chat(fields) if path == CHAT_PATH else _completions(fields)
        for prompt in prompts:
            self._check_length(prompt.tokens)
        return Rendered(
            model=_optional(fields, "model", str, "a string"),
            prompts=[prompt.tokens for prompt in prompts],
            shareable=tuple(prompt.shareable for prompt in prompts),
            stream=_optional(fields, "stream", bool, "a boolean") or False,
            max_tokens=_max_tokens(path, fields),
            client_salt=_optional(fields, "cache_salt", str, "a string"),
            n=_positive(fields, "n") or 1,
        )

    def _check_length(self, tokens: array[int]) -> None:
        if not tokens:
            raise errors.bad_request("The decoder prompt cannot be empty", param="prompt")
        if len(tokens) > self._max_model_len:
            raise errors.context_too_long(limit=self._max_model_len, found=len(tokens))


def _chat(fields: dict[str, Any]) -> list[_Prompt]:
    check_messages(fields)
    continued = _optional(fields, "continue_final_message", bool, "a boolean") or False
    generate = _optional(fields, "add_generation_prompt", bool, "a boolean")
    if continued and generate:
        raise errors.bad_request(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        )
    try:
        rendered = render_chat(
            fields.get("messages") or [],
            _optional(fields, "tools", list, "a list"),
            add_generation_prompt=generate is not False,
            continue_final_message=continued,
        )
    except RenderError as error:
        raise errors.bad_request(str(error), param="messages") from error
    return [_Prompt(rendered.tokens, rendered.shareable)]


def _completions(fields: dict[str, Any]) -> list[_Prompt]:
    """A prompt is a text or token ids; there may be a list of either."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        texts_or_ids: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt:
        texts_or_ids = prompt if isinstance(prompt[0], str | list) else [prompt]
    else:
        raise errors.bad_request(
            "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt"
        )
    return [_Prompt(tokens, len(tokens)) for tokens in map(_tokens, texts_or_ids)]


def _tokens(prompt: Any) -> array[int]:
    if isinstance(prompt, str):
        return encode(prompt)
    if isinstance(prompt, list) and not any(isinstance(item, bool) for item in prompt):
        try:
            return array("I", prompt)
        except (TypeError, OverflowError):
            pass
    raise errors.bad_request(
        "prompt: needed: a text, token ids from 0 to 4294967295, or a list of either", param="prompt"
    )


def _max_tokens(path: str, fields: dict[str, Any]) -> int | None:
    if path == CHAT_PATH:
        return _positive(fields, "max_completion_tokens") or _positive(fields, "max_tokens")
    return _positive(fields, "max_tokens") or DEFAULT_COMPLETION_TOKENS


def _positive(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise errors.bad_request(f"{name}: found {value!r}; needed: an integer of at least 1", param=name)
    return value


def _optional(fields: dict[str, Any], name: str, kind: type, needed: str) -> Any:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise errors.bad_request(f"{name}: found {type(value).__name__}; needed: {needed}", param=name)
    return value
