"""`VllmRenderer`: vLLM's own renderer without an engine, so that the router's token ids are the engine's.

vLLM is imported by `start`, in a thread: the module costs nothing where another engine is configured.
"""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import Awaitable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from router import errors
from router.errors import ApiError
from router.render import CHAT_PATH, RENDERED_PATHS, Rendered, check_messages, parse_object, untouched
from workers.vllm.arguments import parse_engine_args

logger = logging.getLogger(__name__)

RENDER_THREADS = 2
"""vLLM's default is one: a prompt of a megabyte takes seconds, and short ones should not wait for it."""


class VllmRenderer:
    """See `router.render.Renderer`. `engine_args` are the engine's own, by their long names.

    An adapter of the model renders as the model does. What holds media or prompt embeddings comes back
    without prompts: nothing is fetched here.
    """

    def __init__(self, model_path: str, engine_args: Mapping[str, Any]) -> None:
        self._model_path = model_path
        self._engine_args = dict(engine_args)
        self._vllm: _Vllm

    async def start(self) -> None:
        self._vllm = await asyncio.to_thread(_Vllm, self._model_path, self._engine_args)

    async def render(self, path: str, body: bytes) -> Rendered:
        if path not in RENDERED_PATHS:
            return untouched(body, "path")
        fields = parse_object(body)
        reason = self._unrenderable(path, fields)
        if reason:
            return untouched(body, reason)
        if path == CHAT_PATH:
            check_messages(fields)
        request = await self._vllm.parse(path, fields)
        try:
            inputs = await self._vllm.render(path, request)
        except _UnrenderableError as error:
            logger.warning("forwarded without token ids: %s", error)
            return untouched(body, "unrenderable")
        if any(engine_input["type"] != "token" for engine_input in inputs):
            return untouched(body, "multimodal")
        prompts = [array("I", engine_input["prompt_token_ids"]) for engine_input in inputs]
        return Rendered(
            model=request.model,
            prompts=prompts,
            shareable=tuple(map(len, prompts)),
            stream=bool(request.stream),
            max_tokens=_max_tokens(request),
            client_salt=request.cache_salt,
            n=request.n or 1,
        )

    def _unrenderable(self, path: str, fields: Mapping[str, Any]) -> str:
        """Why this form is not rendered here; empty where it is."""
        if path != CHAT_PATH:
            return "prompt_embeds" if fields.get("prompt_embeds") is not None else ""
        # Looked for before validation, which may turn parts into iterators that can be read once.
        return "multimodal" if self._vllm.has_media(fields.get("messages")) else ""


class _UnrenderableError(Exception):
    """Rendering failed for a reason that is not the request's."""


class _Vllm:
    """The parts of vLLM that render, and its own words for what can't be rendered."""

    def __init__(self, model_path: str, engine_args: Mapping[str, Any]) -> None:
        from pydantic import TypeAdapter
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.serve import create_error_response
        from vllm.renderers.chat_utils import has_non_text_content

        self._chat = TypeAdapter(ChatCompletionRequest)
        self._completions = TypeAdapter(CompletionRequest)
        self._error_response = create_error_response
        self.has_media = has_non_text_content
        self._online = _online_renderer(model_path, engine_args)

    async def parse(self, path: str, fields: dict[str, Any]) -> Any:
        """vLLM's request object. Raises ApiError as vLLM's server answers a body that is not valid."""
        from pydantic import ValidationError

        adapter = self._chat if path == CHAT_PATH else self._completions
        try:
            return adapter.validate_python(fields, from_attributes=True)
        except ValidationError as error:
            raise await _validation_error(error.errors(include_url=False)) from error
        except Exception as error:
            # Validators of vLLM take JSON of an unexpected type apart and trip over it.
            raise self._client_error(error) from error

    async def render(self, path: str, request: Any) -> Sequence[Mapping[str, Any]]:
        """The engine's inputs, one per prompt. Raises ApiError, or _UnrenderableError."""
        # No cache of processed media is touched: this process has no engine that would share it.
        if path == CHAT_PATH:
            answer = await self._guarded(self._online.render_chat(request, skip_mm_cache=True))
            inputs = answer[1]
        else:
            inputs = await self._guarded(self._online.render_completion(request, skip_mm_cache=True))
            self._check_vocabulary(request, inputs)
        if not all(engine_input.get("prompt_token_ids", True) for engine_input in inputs):
            raise errors.bad_request("The decoder prompt cannot be empty")
        return inputs  # type: ignore[no-any-return]

    async def _guarded(self, rendering: Awaitable[Any]) -> Any:
        try:
            answer = await rendering
        except (OSError, MemoryError, RuntimeError) as error:
            if isinstance(error, RecursionError | NotImplementedError):
                raise self._client_error(error) from error
            raise _UnrenderableError(f"{type(error).__name__}: {error}") from error
        except Exception as error:
            raise self._client_error(error) from error
        if hasattr(answer, "error"):
            raise _api_error(answer.error)
        return answer

    def _check_vocabulary(self, request: Any, inputs: Sequence[Mapping[str, Any]]) -> None:
        """Token ids from the client; the engine would look at them only after its 200 of a stream."""
        if isinstance(request.prompt, list) and not isinstance(request.prompt[0], str):
            try:
                for engine_input in inputs:
                    self._online.renderer.validate_token_ids(engine_input["prompt_token_ids"])
            except Exception as error:
                raise self._client_error(error) from error

    def _client_error(self, error: Exception) -> ApiError:
        """vLLM's status and words; a 400 where vLLM has a 5xx for what only the request can have caused."""
        answer = self._error_response(error).error
        if answer.code >= 500:
            return errors.bad_request(
                f"The request can't be rendered: {type(error).__name__}: {answer.message}"
            )
        return _api_error(answer)


def _online_renderer(model_path: str, engine_args: Mapping[str, Any]) -> Any:
    from starlette.datastructures import State
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.render.app_state import init_render_app_state

    args = parse_engine_args(model_path, model_path, engine_args)
    engine = AsyncEngineArgs.from_cli_args(args)
    model_config = engine.create_model_config()
    # Kernels of quantised weights are checked against a device, and the router may have none.
    model_config.quantization = None
    model_config.renderer_num_workers = max(model_config.renderer_num_workers, RENDER_THREADS)
    config = VllmConfig(
        model_config=model_config, structured_outputs_config=engine.create_structured_outputs_config()
    )
    state = State()
    asyncio.run(init_render_app_state(config, state, args))
    return state.online_renderer


async def _validation_error(details: Sequence[Mapping[str, Any]]) -> ApiError:
    """In the words of vLLM's own handler, which expects FastAPI's form of the error."""
    from fastapi.exceptions import RequestValidationError
    from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler

    error = RequestValidationError([{**item, "loc": ("body", *item["loc"])} for item in details])
    state = SimpleNamespace(args=SimpleNamespace(log_error_stack=False))
    request: Any = SimpleNamespace(app=SimpleNamespace(state=state))
    response = await validation_exception_handler(request, error)
    return _api_error(SimpleNamespace(**json.loads(response.body)["error"]))


def _api_error(error: Any) -> ApiError:
    return ApiError(int(error.code), error.message, error.type, param=error.param)


def _max_tokens(request: Any) -> int | None:
    limit = getattr(request, "max_completion_tokens", None)
    return limit if limit is not None else request.max_tokens  # type: ignore[no-any-return]
