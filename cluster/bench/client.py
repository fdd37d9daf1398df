"""One request to an OpenAI endpoint, measured."""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp
import msgspec

from cluster.bench.answer import AnswerError, StreamedAnswer
from cluster.bench.config import Target
from cluster.bench.conversation import Planned

MAX_ATTEMPTS = 100
_MAX_RETRY_AFTER_S = 60.0
_ERROR_BODY_BYTES = 2000
_CONNECT_TIMEOUT_S = 30.0
_QUESTION_TIMEOUT = aiohttp.ClientTimeout(total=30.0)


class EndpointError(RuntimeError):
    """The endpoint can't be benchmarked. The message says what was asked and what came."""


class Answered(NamedTuple):
    """How it went. Times are on the client's clock; an error is a value here, never raised."""

    sent: float
    end: float
    token_s: array[float]
    """Seconds from `sent`."""
    text: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    headers: Mapping[str, str]
    status: int | None
    retries: int
    error: str | None


class Client:
    """Keep-alive connections to one endpoint. Use it as an async context manager."""

    def __init__(
        self,
        target: Target,
        api_key: str | None = None,
        on_tokens: Callable[[int], None] = lambda count: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`api_key`: `$OPENAI_API_KEY` where None. `on_tokens` is told of every piece of a stream."""
        self._target = target
        self._on_tokens = on_tokens
        self._clock = clock
        key = os.environ.get("OPENAI_API_KEY") if api_key is None else api_key
        self._headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {key}"} if key else {}
        )
        self._headers |= target.headers
        path = "/v1/chat/completions" if target.endpoint == "chat" else "/v1/completions"
        self._url = target.url + path
        self._model = target.model

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=300, keepalive_timeout=60),
            timeout=aiohttp.ClientTimeout(total=self._target.timeout_s, sock_connect=_CONNECT_TIMEOUT_S),
            headers=self._headers,
            trust_env=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def find_model(self) -> str:
        """The model asked for, the endpoint's first where none was. Raises EndpointError."""
        if not self._model:
            answer = await self._get_json("/v1/models")
            try:
                self._model = str(answer["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise EndpointError(
                    f"{self._target.url}/v1/models names no model; name one with --model"
                ) from None
        return self._model

    async def count_tokens(self, planned: Planned) -> int | None:
        """Tokens of a prompt as the endpoint counts them, None where it has no /tokenize."""
        part = "prompt" if isinstance(planned.prompt, str) else "messages"
        try:
            async with self._session.post(
                f"{self._target.url}/tokenize",
                json={"model": self._model, part: planned.prompt},
                timeout=_QUESTION_TIMEOUT,
            ) as answer:
                return int((await answer.json())["count"]) if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError):
            return None

    async def ask(self, planned: Planned) -> Answered:
        """Send it and read the answer to its end. Cancelling it drops the connection."""
        body = self._body(planned)
        sent = self._clock()
        deadline = sent + self._target.timeout_s
        for retries in range(MAX_ATTEMPTS):
            answered, retry_after_s = await self._attempt(planned, body, sent, retries)
            waited_out = retry_after_s is None or self._clock() + retry_after_s > deadline
            if waited_out or not self._target.retry_429:
                break
            await asyncio.sleep(retry_after_s or 0.0)
        return answered

    async def _attempt(
        self, planned: Planned, body: bytes, sent: float, retries: int
    ) -> tuple[Answered, float | None]:
        """The second value is how long a 429 asks to wait, None for every other answer."""
        status: int | None = None
        headers: Mapping[str, str] = {}
        error: str | None = None
        retry_after_s: float | None = None
        answer = StreamedAnswer(sent)
        try:
            async with self._session.post(self._url, data=body) as response:
                status, headers = response.status, response.headers
                if status == 200:
                    async for data in response.content.iter_any():
                        self._on_tokens(answer.feed(data, self._clock()))
                    answer.finish()
                else:
                    error = f"HTTP {status}: {await _error_text(response)}"
                    retry_after_s = _retry_after_s(headers) if status == 429 else None
        except aiohttp.ConnectionTimeoutError as problem:
            error = f"connection: {problem}"
        except TimeoutError:
            error = f"timeout: not complete after {self._target.timeout_s:g} s"
        except AnswerError as problem:
            error = f"answer: {problem}"
        except (aiohttp.ClientError, OSError) as problem:
            error = f"connection: {problem or type(problem).__name__}"
        counted = answer.input_tokens
        return Answered(
            sent=sent,
            end=self._clock(),
            token_s=answer.token_s,
            text=answer.text,
            input_tokens=planned.input_tokens if counted is None else counted,
            output_tokens=answer.output_tokens,
            cached_tokens=answer.cached_tokens,
            headers=headers,
            status=status,
            retries=retries,
            error=error,
        ), retry_after_s

    def _body(self, planned: Planned) -> bytes:
        chat = self._target.endpoint == "chat"
        fields: dict[str, Any] = {
            "model": self._model,
            "messages" if chat else "prompt": planned.prompt,
            "max_completion_tokens" if chat else "max_tokens": planned.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._target.temperature is not None:
            fields["temperature"] = self._target.temperature
        if self._target.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode(fields | self._target.extra_body)

    async def _get_json(self, path: str) -> Any:
        url = self._target.url + path
        try:
            async with self._session.get(url, timeout=_QUESTION_TIMEOUT) as answer:
                if answer.status != 200:
                    raise EndpointError(f"{url} answered {answer.status}: {await _error_text(answer)}")
                return await answer.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise EndpointError(f"{url}: {str(error) or type(error).__name__}") from error


async def _error_text(response: aiohttp.ClientResponse) -> str:
    body = await response.content.read(_ERROR_BODY_BYTES)
    return " ".join(body.decode("utf-8", "replace").split()) or str(response.reason)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    try:
        return min(_MAX_RETRY_AFTER_S, max(0.0, float(headers.get("retry-after", "1"))))
    except ValueError:
        return 1.0
