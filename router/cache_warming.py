"""Computing a prompt's KV ahead of its first request, and seeing it arrive in the stores."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from cache_store.events import ChunkKey
from router import errors
from router.asgi import Scope
from router.cache_answers import Warmed
from router.client import Receive, Send
from router.core import Query, RouterCore
from router.headers import parse_cached
from router.index import PrefixIndex
from router.named_chunks import PromptNamed, check_prompt, engine_chunks
from router.upstream import UpstreamError
from workers.messages import CACHED_HEADER, REPLICA_HEADER

Run = Callable[[Scope, bytes, Query, Receive, Send], Awaitable[None]]
"""Answer a request as the router answers its clients. Raises ApiError, ClientGone and UpstreamError."""

_FIRST_LOOK_S, _LAST_LOOK_S = 0.01, 0.5


class Refused(Exception):
    """The replica's own answer, which is no success. `body` is what it said."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"the replica answered {status}")
        self.status = status
        self.body = body


async def warm(
    core: RouterCore, run: Run, prompt: PromptNamed, query: Query, wait_s: float, receive: Receive
) -> Warmed:
    """Run the request, then wait at most `wait_s` for the prompt's chunks to be in a store.

    A client that leaves before the answer ends it, in the engine too. Raises ApiError, Refused and ClientGone.
    """
    prompt_tokens = check_prompt(query)
    answer = _Answer()
    try:
        await run(_scope(prompt), prompt.body, query, receive, answer.send)
    except UpstreamError as error:
        raise errors.upstream_failed(str(error)) from error
    if answer.status != 200:
        raise Refused(answer.status, bytes(answer.body))
    replica = answer.header(REPLICA_HEADER)
    cached = parse_cached(answer.header(CACHED_HEADER))
    computed = cached.pop("computed", prompt_tokens)
    # Other kinds of engines have other keys: what is to be stored are the chunks of the one that computed them.
    kinds = engine_chunks(query, core.directory)
    keys = next((kind.keys for kind in kinds if replica in kind.replicas), [])
    stored = await wait_stored(core.index, keys, wait_s)
    return Warmed(replica, prompt_tokens, cached, computed, len(keys), stored)


async def wait_stored(index: PrefixIndex, keys: Sequence[ChunkKey], wait_s: float) -> int:
    """How many of the chunks are in a store of the cluster: when all are, or else after `wait_s`."""
    loop = asyncio.get_running_loop()
    end, pause_s = loop.time() + wait_s, _FIRST_LOOK_S
    while True:
        stored = count_stored(index, keys)
        left_s = end - loop.time()
        if stored == len(keys) or left_s <= 0:
            return stored
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LAST_LOOK_S)


def count_stored(index: PrefixIndex, keys: Sequence[ChunkKey]) -> int:
    tiers, bits = index.match(keys).tiers, 0
    for tier, match in tiers.items():
        if tier != "hbm":
            bits |= match.present
    return bits.bit_count()


def _scope(prompt: PromptNamed) -> Scope:
    """As of a client that sends nothing but this body."""
    return {
        "type": "http",
        "method": "POST",
        "path": prompt.path,
        "raw_path": prompt.path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }


class _Answer:
    """An answer that is kept instead of sent."""

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self._headers: dict[bytes, bytes] = {}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status, self._headers = message["status"], dict(message["headers"])
        else:
            self.body += message.get("body", b"")

    def header(self, name: str) -> str:
        return self._headers.get(name.encode(), b"").decode("latin-1")
