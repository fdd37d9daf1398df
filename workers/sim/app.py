"""The simulated engine's OpenAI-compatible server: pure ASGI, the answers as vLLM's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import Receive, Scope, Send

from workers.engine import EngineUnhealthyError
from workers.handover import FirstHalf
from workers.request_record import current_request
from workers.sim import answers
from workers.sim.answers import Answer, ChatAnswer, CompletionAnswer
from workers.sim.connection import ClientGoneError, Connection
from workers.sim.generation import EngineStoppedError, PromptTooLongError
from workers.sim.metrics import render_metrics
from workers.sim.reply import StreamReply, WholeReply
from workers.sim.requests import (
    BadRequestError,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    FaultBody,
    GenerationRequest,
    TokenizeBody,
    chat_request,
    check_tokens,
    completion_request,
    read,
    render,
)
from workers.sim.sequence import Sampling
from workers.sim.tokens import decode, encode

if TYPE_CHECKING:
    from workers.sim.engine import SimEngine

logger = logging.getLogger(__name__)


class _HttpError(Exception):
    """An answer in OpenAI's error shape."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = answers.error(status, kind, message, param)


class SimApp:
    """Endpoints over one engine. A request whose client is gone is aborted at once."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._created = int(time.time())
        self._routes: dict[str, tuple[str, Callable[[Connection], Awaitable[None]]]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completions),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/sim/fault": ("POST", self._fault),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        connection = Connection(scope, receive, send)
        try:
            await self._route(scope)(connection)
        except ClientGoneError:
            pass
        except _HttpError as error:
            await connection.json(error.body, error.status)
        except BadRequestError as error:
            await connection.json(answers.error(400, "BadRequestError", str(error), error.param), 400)
        except PromptTooLongError as error:
            await connection.json(answers.error(400, "BadRequestError", str(error), "input_tokens"), 400)
        except EngineStoppedError as error:
            await connection.json(answers.error(500, "InternalServerError", str(error)), 500)

    def _route(self, scope: Scope) -> Callable[[Connection], Awaitable[None]]:
        method, handler = self._routes.get(scope["path"], ("", None))
        if handler is None:
            raise _HttpError(404, "Not Found", "Not Found")
        if scope["method"] != method:
            raise _HttpError(405, "Method Not Allowed", "Method Not Allowed")
        return handler

    async def _chat(self, connection: Connection) -> None:
        body = read(await self._json_body(connection), ChatBody)
        model, adapter = self._model(body.model)
        answer = ChatAnswer(f"chatcmpl-{_request_id(connection)}", int(time.time()), model)
        await self._generate(connection, chat_request(body, _given_prompts()), answer, adapter)

    async def _completions(self, connection: Connection) -> None:
        body = read(await self._json_body(connection), CompletionBody)
        model, adapter = self._model(body.model)
        answer = CompletionAnswer(f"cmpl-{_request_id(connection)}", int(time.time()), model)
        await self._generate(connection, completion_request(body, _given_prompts()), answer, adapter)

    async def _generate(
        self, connection: Connection, request: GenerationRequest, answer: Answer, adapter: str
    ) -> None:
        fault = self._engine.faults.strike()
        if fault == "refuse":
            raise _HttpError(503, "ServiceUnavailableError", "simulated fault: refuse")
        if fault == "hang":
            await connection.wait_until_gone()
        record = current_request.get()
        salt = request.salt if record is None else record.salt
        if record is not None and record.first_half is not None:
            if fault == "die_before_token":
                await connection.drop()
            await self._first_half(connection, request, adapter, salt, record.first_half)
            return
        fetch = record.fetch if record is not None else None
        generation = self._engine.submit(
            request.prompts, request.choices, adapter=adapter, salt=salt, fetch=fetch
        )
        watcher = asyncio.create_task(self._abort_when_gone(connection, generation))
        try:
            reply = (StreamReply if request.stream else WholeReply)(connection, request, answer, generation)
            if fault == "die_before_token":
                await reply.start()
                await connection.drop()
            await reply.run(self._engine.faults.after_tokens if fault == "die_mid_stream" else None)
        finally:
            self._engine.abort(generation)
            watcher.cancel()

    async def _first_half(
        self, connection: Connection, request: GenerationRequest, adapter: str, salt: str, half: FirstHalf
    ) -> None:
        if len(request.prompts) != 1 or request.prompts[0].media:
            half.refusal = "it has several prompts, or one that is more than tokens"
            return
        choices = [Sampling(max_tokens=1, keep=half.name)]
        generation = self._engine.submit(request.prompts, choices, adapter=adapter, salt=salt)
        watcher = asyncio.create_task(self._abort_when_gone(connection, generation))
        try:
            async for outputs in generation.outputs():
                if any(output.finish_reason is not None for _, output in outputs):
                    self._engine.keep(half, generation, adapter)
        finally:
            self._engine.abort(generation)
            watcher.cancel()

    async def _abort_when_gone(self, connection: Connection, generation: Any) -> None:
        with contextlib.suppress(ClientGoneError):
            await connection.wait_until_gone()
        self._engine.abort(generation)

    async def _models(self, connection: Connection) -> None:
        info = self._engine.info
        await connection.json(answers.model_list(info.models, info.max_model_len, self._created))

    async def _tokenize(self, connection: Connection) -> None:
        body = read(await self._json_body(connection), TokenizeBody)
        self._model(body.model)
        if body.prompt is None and body.messages is None:
            raise BadRequestError("prompt: Field required; or messages", "prompt")
        tokens = encode(body.prompt) if body.prompt is not None else render(body).tokens
        await connection.json(
            {
                "count": len(tokens),
                "max_model_len": self._engine.info.max_model_len,
                "tokens": tokens.tolist(),
                "token_strs": [decode([token]) for token in tokens] if body.return_token_strs else None,
            }
        )

    async def _detokenize(self, connection: Connection) -> None:
        body = read(await self._json_body(connection), DetokenizeBody)
        self._model(body.model)
        await connection.json({"prompt": check_tokens(body.tokens)})

    async def _health(self, connection: Connection) -> None:
        try:
            await self._engine.check_health()
        except EngineUnhealthyError:
            await connection.respond(b"", HTTPStatus.SERVICE_UNAVAILABLE)
        else:
            await connection.respond(b"")

    async def _metrics(self, connection: Connection) -> None:
        await connection.respond(
            render_metrics(self._engine).encode(), content_type=b"text/plain; version=0.0.4"
        )

    async def _fault(self, connection: Connection) -> None:
        body = read(await connection.body(), FaultBody)
        try:
            self._engine.faults.set(body.fault, body.count, body.after_tokens)
        except ValueError as error:
            raise BadRequestError(str(error)) from error
        await connection.json(msgspec.to_builtins(body))

    async def _json_body(self, connection: Connection) -> bytes:
        if connection.header(b"content-type").split(b";")[0].strip().lower() != b"application/json":
            message = "Unsupported Media Type: Only 'application/json' is allowed"
            raise _HttpError(400, "Bad Request", message)
        return await connection.body()

    def _model(self, name: str | None) -> tuple[str, str]:
        """The model's name as clients know it, and the engine's name of its adapter, empty for none."""
        info = self._engine.info
        if not name or name == info.models[0]:
            return info.models[0], ""
        for public, engine_name in info.adapters.items():
            if name in (public, engine_name):
                return public, engine_name
        raise _HttpError(404, "NotFoundError", f"The model `{name}` does not exist.", "model")


def _given_prompts() -> list[list[int]] | None:
    record = current_request.get()
    return None if record is None else record.prompts


def _request_id(connection: Connection) -> str:
    return connection.header(b"x-request-id").decode("latin-1") or uuid.uuid4().hex


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
