"""Counts what the tokenizer of a replica's process is asked to do.

An ASGI middleware, for vLLM's argument `middleware`, so that the count is kept where the engine's server runs.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

COUNT_PATH = "/tokenizer-calls"
COUNTED = ("__call__", "encode", "apply_chat_template")
"""Of a tokenizer: what turns text or messages into something else."""


class TokenizerCount:
    """Answers a GET of COUNT_PATH with calls by name, since the start of the process."""

    def __init__(self, app: ASGIApp) -> None:
        from transformers import PreTrainedTokenizerBase

        self._app = app
        self._calls: Counter[str] = Counter()
        for name in COUNTED:
            setattr(
                PreTrainedTokenizerBase, name, self._counted(name, getattr(PreTrainedTokenizerBase, name))
            )

    def _counted(self, name: str, original: Any) -> Any:
        @functools.wraps(original)  # vLLM reads the signature
        def call(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._calls[name] += 1
            return original(tokenizer, *args, **kwargs)

        return call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != COUNT_PATH:
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(self._calls).encode()})
