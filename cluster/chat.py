"""A chat client of the OpenAI API that measures what a user would feel."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from workers.messages import CACHED_HEADER, REPLICA_HEADER

Message = dict[str, str]


class ChatError(RuntimeError):
    """A chat that got no whole answer. The message says what was answered instead."""


@dataclass(frozen=True)
class ChatAnswer:
    """One streamed answer."""

    text: str
    replica: str
    """Id of the replica that answered."""
    cached: int
    """Prompt tokens whose KV was there, in any tier."""
    computed: int
    """Prompt tokens that were computed."""
    ttft_s: float
    """From the request's first byte sent to the first text received."""


def ask(
    endpoint: str, model: str, messages: Sequence[Message], max_tokens: int, timeout_s: float = 120.0
) -> ChatAnswer:
    """Send a chat to `endpoint` and read its stream to the end. Raises ChatError."""
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=timeout_s)
    try:
        began = time.perf_counter()
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise ChatError(f"{endpoint} answered {response.status}: {_said(response.read())}")
        first = 0.0
        pieces = []
        for piece in _pieces(response):
            first = first or time.perf_counter()
            pieces.append(piece)
    except (OSError, http.client.HTTPException) as error:
        raise ChatError(f"{endpoint} gave no whole answer: {str(error) or type(error).__name__}") from error
    finally:
        connection.close()
    if not pieces:
        raise ChatError(f"{endpoint} answered with no text")
    cached, computed = parse_cached(response.headers.get(CACHED_HEADER, ""))
    replica = response.headers.get(REPLICA_HEADER, "")
    return ChatAnswer("".join(pieces), replica, cached, computed, first - began)


def parse_cached(header: str) -> tuple[int, int]:
    """(cached, computed) tokens of an `x-manta-cached`, the tiers added up. Raises ChatError for anything else."""
    try:
        tokens = {tier: int(count) for tier, count in (part.split("=") for part in header.split(","))}
        computed = tokens.pop("computed")
    except (ValueError, KeyError):
        raise ChatError(f"{CACHED_HEADER} is {header!r}; needed: tokens per tier and computed") from None
    return sum(tokens.values()), computed


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """The text of a stream of events. Raises ChatError for an error event, or an end without `[DONE]`."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatError(f"the stream broke off: {_message(event)}")
        for choice in event.get("choices", ()):
            if text := choice.get("delta", {}).get("content"):
                yield text
    raise ChatError("the stream ended before its [DONE]")


def _said(body: bytes) -> str:
    try:
        return _message(json.loads(body))
    except ValueError:
        return body[:300].decode(errors="replace").strip()


def _message(answer: Any) -> str:
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
