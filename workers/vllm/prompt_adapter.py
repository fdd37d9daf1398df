"""Puts the router's token ids in where vLLM would render and tokenise, and the tenant's salt over a client's.

The one place that knows how vLLM turns a request into an engine's input. Three methods are wrapped:

    render_messages_async      chat: neither Jinja nor the tokenizer runs
    render_cmpl_async          completions: each text prompt takes its ids; its text stays, for `echo`
    process_for_engine_async   the salt of the request's record replaces whatever the body said

Everything around them stays vLLM's own: its length checks and truncation see the ids, and the conversation
that `echo` reads is parsed from the messages. Outside of a request, and for what the router could not render,
nothing changes. The record is read in coroutines only: vLLM's executor threads do not inherit the context.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import Counter

from workers.request_record import RequestRecord, current_request

logger = logging.getLogger(__name__)

WRAPPED = {
    "render_messages_async": ("messages", "params"),
    "render_cmpl_async": ("prompts", "tok_params"),
    "process_for_engine_async": ("prompt", "arrival_time"),
}
"""Methods of vLLM's renderer and the arguments that they begin with."""

# In the default registry, which is what vLLM's /metrics shows.
_SUBSTITUTED = Counter("manta_substituted_prompts", "Prompts that took their token ids from the router.")
_MISMATCHED = Counter(
    "manta_mismatched_requests",
    "Requests whose token ids from the router did not fit; they were rendered here.",
)


class PromptAdapterError(RuntimeError):
    """This vLLM's renderer is not the one that the adapter was written for."""


def install(renderer: Any) -> PromptAdapter:
    """Wrap the renderer of one engine (`AsyncLLM.renderer`), once, before its first request.

    Raises PromptAdapterError, with vLLM's version, where a method is missing or begins with other arguments.
    """
    _check_contract(renderer)
    adapter = PromptAdapter(renderer)
    for name in WRAPPED:
        setattr(renderer, name, getattr(adapter, name))
    return adapter


def set_salt(engine_input: Any) -> None:
    """Give an engine's input the salt of the current request's record, and no salt where the record has none.

    vLLM makes some inputs past its renderer (ids in `kv_transfer_params`, gpt-oss, scoring), so the entry
    of the engine has to call this too. Does nothing outside of a request, and to an input that is no mapping.
    """
    record = current_request.get()
    if record is None or not isinstance(engine_input, dict):
        return
    # An encoder-decoder input carries its salt in its parts.
    parts = [engine_input, engine_input.get("encoder_prompt"), engine_input.get("decoder_prompt")]
    for part in parts:
        if not isinstance(part, dict):
            continue
        if record.salt:
            part["cache_salt"] = record.salt
        else:
            part.pop("cache_salt", None)


class PromptAdapter:
    """The wrapped methods, and how often they did what."""

    def __init__(self, renderer: Any) -> None:
        from vllm.inputs import TokensPrompt
        from vllm.renderers.chat_utils import has_non_text_content, parse_chat_messages_async

        self.substituted = 0
        """Prompts that took their ids from the router."""
        self.mismatched = 0
        """Requests whose ids did not fit their prompts; they were rendered here."""
        self._renderer = renderer
        self._render_messages: Callable[..., Any] = renderer.render_messages_async
        self._render_cmpl: Callable[..., Any] = renderer.render_cmpl_async
        self._process_for_engine: Callable[..., Any] = renderer.process_for_engine_async
        self._tokens_prompt = TokensPrompt
        self._has_media = has_non_text_content
        self._parse = parse_chat_messages_async

    async def render_messages_async(self, messages: list[Any], params: Any) -> Any:
        record = _record_with_prompts()
        if record is None:
            return await self._render_messages(messages, params)
        _make_contents_readable(messages)
        if self._has_media(messages):
            return await self._render_messages(messages, params)
        ids = self._take(record, 1)
        if ids is None:
            return await self._render_messages(messages, params)
        # Only `echo` reads the conversation, and joins parts of text as the format "string" does.
        conversation, _, _ = await self._parse(messages, self._renderer.model_config, content_format="string")
        return conversation, self._tokens_prompt(prompt_token_ids=ids[0])

    async def render_cmpl_async(self, prompts: Sequence[Any], tok_params: Any = None, **options: Any) -> Any:
        record = _record_with_prompts()
        if record is not None and any(_is_text(prompt) for prompt in prompts):
            ids = self._take(record, len(prompts))
            if ids is not None:
                params = self._renderer.default_cmpl_tok_params if tok_params is None else tok_params
                prompts = [self._with_ids(*pair, params) for pair in zip(prompts, ids, strict=True)]
        return await self._render_cmpl(prompts, tok_params, **options)

    async def process_for_engine_async(self, prompt: Any, arrival_time: float, **options: Any) -> Any:
        engine_input = await self._process_for_engine(prompt, arrival_time, **options)
        set_salt(engine_input)
        return engine_input

    def _with_ids(self, prompt: Any, ids: list[int], params: Any) -> Any:
        if not _is_text(prompt):
            return prompt
        # The check of the text's length and its cut, which vLLM makes before it tokenises.
        prompt = params.apply_pre_tokenization(self._renderer.tokenizer, prompt)
        return self._tokens_prompt(prompt_token_ids=ids, **prompt)

    def _take(self, record: RequestRecord, count: int) -> list[list[int]] | None:
        """Ids for `count` prompts; None where the record has another number of them, or empty ones."""
        prompts = record.prompts or []
        if len(prompts) != count or not all(prompts):
            if not self.mismatched:
                logger.warning(
                    "request %s: the router sent token ids of %s for %d prompts; rendering here "
                    "(further ones are counted, not logged)",
                    record.request_id,
                    [len(ids) for ids in prompts],
                    count,
                )
            self.mismatched += 1
            _MISMATCHED.inc()
            return None
        self.substituted += count
        _SUBSTITUTED.inc(count)
        # Copies: truncation and padding work on the list, and a retry may read the record again.
        return [list(ids) for ids in prompts]


def _record_with_prompts() -> RequestRecord | None:
    record = current_request.get()
    return record if record is not None and record.prompts is not None else None


def _make_contents_readable(messages: list[Any]) -> None:
    """Validation may leave a list of parts as an iterator that can be read once; here it is read twice."""
    for message in messages:
        if isinstance(message, dict):
            content = message.get("content")
            if content is not None and not isinstance(content, str | list):
                message["content"] = list(content)


def _is_text(prompt: Any) -> bool:
    return (
        isinstance(prompt, dict)
        and isinstance(prompt.get("prompt"), str)
        and not {"prompt_token_ids", "prompt_embeds", "encoder_prompt", "multi_modal_data"} & prompt.keys()
    )


def _check_contract(renderer: Any) -> None:
    for name, arguments in WRAPPED.items():
        method = getattr(renderer, name, None)
        where = f"vLLM {_vllm_version()}: {type(renderer).__name__}.{name}"
        if not inspect.iscoroutinefunction(method):
            raise PromptAdapterError(f"{where}: found {method!r}; needed: a coroutine function")
        found = tuple(inspect.signature(method).parameters)[: len(arguments)]
        if found != arguments:
            raise PromptAdapterError(f"{where}: found arguments {found}; needed: {arguments}")


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)
