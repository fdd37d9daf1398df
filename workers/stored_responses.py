"""Keeps tenants apart at vLLM's store of responses, which knows no tenants.

A response belongs to the cache salt that it was made under. Whoever asks for it, cancels it or continues it under
another salt gets the answer of a response that does not exist. Pure ASGI, between the replica's HTTP layer and the
OpenAI application.

The call that makes a response in the background lasts, for the layer above, until that response has ended: so it
counts as an open request, which draining waits for.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from workers import background
from workers.request_record import current_request

RESPONSES_PATH = "/v1/responses"
MAX_OWNERS = 100_000
_ID = re.compile(rb'"id":\s*"(resp_[A-Za-z0-9_-]{1,128})"')
_IN_PATH = re.compile(r"/v1/responses/([^/]+)(?:/cancel)?")


class _Body(msgspec.Struct):
    previous_response_id: str | None = None
    background: Any = None
    """Whatever is truthy: vLLM reads more than `true` as such, and no odd value may hide the field above."""


class ResponseGuard:
    """The oldest owners are forgotten beyond `max_owners`; what they own is then nobody's, and not found."""

    def __init__(self, inner: ASGIApp, max_owners: int = MAX_OWNERS) -> None:
        self._inner = inner
        self._max_owners = max_owners
        self._owners: OrderedDict[str, str] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(RESPONSES_PATH):
            await self._inner(scope, receive, send)
            return
        record = current_request.get()
        salt = record.salt if record is not None else ""
        if scope["path"] == RESPONSES_PATH:
            await self._create(scope, receive, send, salt)
        elif self._owns(_IN_PATH.fullmatch(scope["path"]), salt):
            await self._inner(scope, receive, send)
        else:
            await _not_found(send, scope["path"].removeprefix(RESPONSES_PATH + "/"))

    def _owns(self, asked: re.Match[str] | None, salt: str) -> bool:
        return asked is not None and self._owners.get(asked[1]) == salt

    async def _create(self, scope: Scope, receive: Receive, send: Send, salt: str) -> None:
        messages: list[Message] = []
        while not messages or messages[-1].get("more_body"):
            messages.append(await receive())
            if messages[-1]["type"] == "http.disconnect":
                return
        asked = _parsed(b"".join(message.get("body", b"") for message in messages))
        previous = asked.previous_response_id
        if previous is not None and self._owners.get(previous) != salt:
            await _not_found(send, previous)
            return
        replayed = iter(messages)

        async def again() -> Message:
            return next(replayed, None) or await receive()

        # The application writes into the scope that it is given, and this one may be needed again.
        made: list[str] = []
        await self._inner(dict(scope), again, self._learning(send, salt, made))
        if asked.background and made:
            await background.ended(self._inner, scope, made[0])

    def _learning(self, send: Send, salt: str, made: list[str]) -> Send:
        """The id stands in the first bytes of an answer, streamed or not. `made` gets it."""

        async def learn(message: Message) -> None:
            if not made and (found := _ID.search(message.get("body", b""))):
                made.append(found[1].decode())
                self._owners[made[0]] = salt
                while len(self._owners) > self._max_owners:
                    self._owners.popitem(last=False)
            await send(message)

        return learn


def _parsed(body: bytes) -> _Body:
    try:
        return msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Body()  # vLLM has better words for what is wrong with it


async def _not_found(send: Send, response: str) -> None:
    """As vLLM says it."""
    error = {"message": f"Response with id '{response}' not found.", "type": "invalid_request_error"}
    body = json.dumps({"error": {**error, "param": "response_id", "code": 404}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 404, "headers": headers})
    await send({"type": "http.response.body", "body": body})
