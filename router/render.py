"""The seam between a router and a model's chat template and tokenizer: a client's body in, token ids out."""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from router import errors

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
RENDERED_PATHS = frozenset({CHAT_PATH, COMPLETIONS_PATH})
"""Paths whose bodies are rendered; a body for any other path is forwarded untouched."""

DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of /v1/completions where the client gives none."""


@dataclass(frozen=True)
class Rendered:
    """What a router needs to know of a request to place it."""

    model: str | None
    """Name that the client asked for, unchecked; None where it gave none."""
    prompts: list[array[int]] | None
    """Token ids of each prompt, uint32 (typecode "I"), none empty. None when this form can't be rendered here
    and its body is forwarded untouched."""
    reason: str = ""
    """Why there are no prompts, as a label: `path`, `multimodal`, `prompt_embeds`, `unrenderable`."""
    shareable: tuple[int, ...] = ()
    """Per prompt, the leading tokens whose KV the tokens alone determine: those before the first image, sound
    or prompt embedding. Nothing behind them is keyed."""
    stream: bool = False
    max_tokens: int | None = None
    """Output tokens of one choice at most; None for as many as the context has room for."""
    client_salt: str | None = None
    """The body's `cache_salt`. It never reaches an engine; a tenant may use it to part its own KV."""
    n: int = 1
    """Choices per prompt."""
    previous_response_id: str | None = None
    """The stored response that a body for /v1/responses continues."""


class Renderer(Protocol):
    """Renders as the engine behind the router would. Call order: start, then render any number of times.

    A router asks before it decides, so that a body that can't be answered costs no replica anything.
    """

    async def start(self) -> None:
        """Load tokenizer and chat template. Raises what the engine would raise for the same model."""

    async def render(self, path: str, body: bytes) -> Rendered:
        """Render the body of a POST to `path`, in another thread where that takes long.

        Raises ApiError, with a 4xx status, for a body that no engine would take: malformed JSON, no messages,
        a prompt longer than the context. Whatever else a client sends is rendered, or has no prompts.
        """


def parse_object(body: bytes) -> dict[str, Any]:
    """The fields of a JSON body. Raises ApiError 400: malformed, with the position, or not an object."""
    try:
        fields = json.loads(body)
    except json.JSONDecodeError as error:
        raise errors.malformed_json(str(error)) from error
    except UnicodeDecodeError as error:
        raise errors.malformed_json(f"{error.reason} in UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise errors.bad_request("body: nested too deeply", param="body") from error
    except ValueError as error:
        raise errors.bad_request(f"body: {error}", param="body") from error
    if not isinstance(fields, dict):
        raise errors.bad_request(f"body: found {_json_type(fields)}; needed: a JSON object", param="body")
    if fields.get("kv_transfer_params") is not None:
        raise _reserved()
    return fields


def check_messages(fields: dict[str, Any]) -> None:
    """Raises ApiError 400 for a chat without messages."""
    if fields.get("messages") == []:
        raise errors.bad_request(
            "Cannot apply chat template to an empty conversation. Provide at least one message.",
            param="messages",
        )


def untouched(body: bytes, reason: str) -> Rendered:
    """For a body that is forwarded as it is: what can be read of it without knowing its form."""
    try:
        fields = _peek.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Rendered(None, None, reason)
    if fields.kv_transfer_params is not None:
        raise _reserved()
    previous = fields.previous_response_id
    return Rendered(
        model=fields.model if isinstance(fields.model, str) else None,
        prompts=None,
        reason=reason,
        stream=fields.stream is True,
        client_salt=fields.cache_salt if isinstance(fields.cache_salt, str) else None,
        previous_response_id=previous if isinstance(previous, str) else None,
    )


class _Peek(msgspec.Struct):
    model: Any = None
    stream: Any = None
    cache_salt: Any = None
    kv_transfer_params: Any = None
    previous_response_id: Any = None


def _reserved() -> errors.ApiError:
    """The field moves KV between engines, past the cluster's accounting and past its tenants."""
    return errors.bad_request(
        "kv_transfer_params is for the cluster's own use; needed: a body without it",
        param="kv_transfer_params",
    )


_peek = msgspec.json.Decoder(_Peek)


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
