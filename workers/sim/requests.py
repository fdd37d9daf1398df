"""What clients ask of the simulated engine, read from OpenAI's request bodies as vLLM reads them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from workers.sim.sequence import Sampling
from workers.sim.tokens import RenderedPrompt, RenderError, decode, encode, render_chat

# A bound that no context reaches; the engine lowers it to what the context leaves.
_UNLIMITED = 1 << 40
_MAX_CHOICES = 16384


class BadRequestError(ValueError):
    """A request that can't be served. `param` names the field where one is to blame."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(msgspec.Struct, kw_only=True):
    """Fields that both kinds of request have. Others, such as temperature, are taken and have no effect."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = 1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    seed: int | None = None
    ignore_eos: bool = False
    return_token_ids: bool | None = None
    cache_salt: str | None = None


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class CompletionBody(Body, kw_only=True):
    prompt: str | list[Any] | None = None
    max_tokens: int | None = 16
    echo: bool | None = False


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


class FaultBody(msgspec.Struct, kw_only=True):
    fault: str
    count: int | None = None
    after_tokens: int = 1


@dataclass(frozen=True)
class GenerationRequest:
    """A request of either kind, ready for the engine."""

    model: str
    prompts: tuple[RenderedPrompt, ...]
    choices: tuple[Sampling, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    salt: str
    echo: bool = False


_B = TypeVar("_B")


def read(data: bytes, kind: type[_B]) -> _B:
    """Decode a body. Raises BadRequestError that says where it is wrong."""
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except msgspec.ValidationError as error:
        where = str(error).partition(" - at `$")[2].rstrip("`")
        raise BadRequestError(f"1 validation error: {error}", f"body{where}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"JSON decode error: {error}", "body") from error


def chat_request(body: ChatBody, token_ids: Sequence[Sequence[int]] | None) -> GenerationRequest:
    """`token_ids` replace what the template gives. Raises BadRequestError."""
    prompt = render(body)
    prompts = _replace((prompt,), token_ids)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return _request(body, prompts, limit, echo=False)


def completion_request(body: CompletionBody, token_ids: Sequence[Sequence[int]] | None) -> GenerationRequest:
    """`token_ids` replace those of the body's prompts. Raises BadRequestError."""
    prompts = tuple(RenderedPrompt(tokens, len(tokens)) for tokens in completion_prompts(body.prompt))
    return _request(body, _replace(prompts, token_ids), body.max_tokens, echo=bool(body.echo))


def render(body: ChatBody | TokenizeBody) -> RenderedPrompt:
    """The prompt of a chat. Raises BadRequestError."""
    try:
        return render_chat(
            body.messages or (),
            body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
    except RenderError as error:
        raise BadRequestError(str(error), "messages") from error


def completion_prompts(prompt: str | list[Any] | None) -> list[array[int]]:
    """Token ids of each prompt: text, token ids, or a list of either. Raises BadRequestError."""
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [prompt]
    else:
        prompts = prompt or []
    if not prompts or not all(prompts):
        raise BadRequestError("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    return [encode(each) if isinstance(each, str) else _token_ids(each) for each in prompts]


def check_tokens(tokens: Sequence[int]) -> str:
    """The text of token ids. Raises BadRequestError for ids outside the vocabulary."""
    try:
        return decode(tokens)
    except ValueError as error:
        raise BadRequestError(str(error), "tokens") from error


def _token_ids(ids: Any) -> array[int]:
    try:
        return array("I", ids)
    except (OverflowError, TypeError, ValueError) as error:
        raise BadRequestError(
            f"prompt: token ids must be integers from 0 to 2**32 - 1 ({error})", "prompt"
        ) from error


def _replace(
    prompts: tuple[RenderedPrompt, ...], token_ids: Sequence[Sequence[int]] | None
) -> tuple[RenderedPrompt, ...]:
    if token_ids is None:
        return prompts
    if len(token_ids) != len(prompts):
        raise BadRequestError(
            f"{len(token_ids)} lists of token ids came with a request of {len(prompts)} prompts"
        )
    return tuple(
        RenderedPrompt(array("I", ids), prompt.shareable if prompt.media else len(ids), prompt.media)
        for prompt, ids in zip(prompts, token_ids, strict=True)
    )


def _request(
    body: Body, prompts: tuple[RenderedPrompt, ...], max_tokens: int | None, echo: bool
) -> GenerationRequest:
    if max_tokens is not None and max_tokens < 1:
        raise BadRequestError(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens")
    n = 1 if body.n is None else body.n
    if not 1 <= n <= _MAX_CHOICES:
        raise BadRequestError(f"n must be from 1 to {_MAX_CHOICES}, got {n}.", "n")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if not all(stop):
        raise BadRequestError("stop cannot contain an empty string.", "stop")
    options = body.stream_options
    if options is not None and not body.stream:
        raise BadRequestError("Stream options can only be defined when `stream=True`.", "stream_options")
    choices = tuple(
        Sampling(
            max_tokens=_UNLIMITED if max_tokens is None else max_tokens,
            may_end=max_tokens is None and not body.ignore_eos,
            stop=stop,
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            include_stop=body.include_stop_str_in_output,
            seed=body.seed or 0,
            choice=choice,
        )
        for choice in range(n)
    )
    include_usage = options is not None and options.include_usage
    return GenerationRequest(
        model=body.model or "",
        prompts=prompts,
        choices=choices,
        stream=bool(body.stream),
        include_usage=include_usage,
        continuous_usage=include_usage and options is not None and options.continuous_usage_stats,
        return_token_ids=bool(body.return_token_ids),
        salt=body.cache_salt or "",
        echo=echo,
    )
