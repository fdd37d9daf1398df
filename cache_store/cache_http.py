"""The HTTP side of a cache actor: its event stream, what routers ask of it, and its metrics.

Pure ASGI; the cluster's secret is asked for on every path.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import Receive, Scope, Send

from cache_store.cache_messages import (
    EVICT_PATH,
    LIST_PATH,
    MAX_LISTED,
    METRICS_PATH,
    PIN_PATH,
    PREFETCH_PATH,
    STATS_PATH,
    UNPIN_PATH,
    WHERE_PATH,
    Affected,
    KeysRequest,
    Where,
)
from cache_store.event_endpoint import knows_secret, read_body, send_error, send_whole, serve_events
from cache_store.events import ChunkKey, unpack_keys
from cache_store.node_store import NodeStore
from cache_store.stream import Publisher

MAX_BODY_BYTES = 16 * 1024 * 1024
_MSGPACK = b"application/msgpack"


class CacheApp:
    """ASGI application of one cache actor. Lives on the store's loop."""

    def __init__(
        self, store: NodeStore, publisher: Publisher, secret: str, metrics: CollectorRegistry
    ) -> None:
        self._store = store
        self._publisher = publisher
        self._secret = secret.encode()
        self._metrics = metrics
        self._posts: dict[str, Callable[[list[ChunkKey], KeysRequest], msgspec.Struct]] = {
            PREFETCH_PATH: lambda keys, asked: Affected(
                store.prefetch(keys, asked.world_size, asked.sources)
            ),
            WHERE_PATH: lambda keys, _: Where([tuple(tiers) for tiers in store.tiers_of(keys)]),
            PIN_PATH: lambda keys, _: Affected(store.pin(keys)),
            UNPIN_PATH: lambda keys, _: Affected(store.unpin(keys)),
            EVICT_PATH: lambda keys, _: Affected(store.evict(keys or None)),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        if not knows_secret(scope, self._secret):
            await send_error(send, 401, "AuthenticationError", "The cluster's secret is missing or wrong.")
        elif method == "POST" and path in self._posts:
            await self._post(path, receive, send)
        elif method != "GET":
            await send_error(send, 405, "BadRequestError", f"{method} is not for {path}.")
        elif path == STATS_PATH:
            await send_whole(send, 200, msgspec.msgpack.encode(self._store.stats()), _MSGPACK)
        elif path == LIST_PATH:
            await self._list(scope, send)
        elif path == METRICS_PATH:
            await send_whole(send, 200, generate_latest(self._metrics), CONTENT_TYPE_LATEST.encode())
        elif not await serve_events(self._publisher, path, receive, send):
            await send_error(send, 404, "NotFoundError", f"A cache actor has no {path}.")

    async def _post(self, path: str, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, MAX_BODY_BYTES)
            if body is None:
                return
            asked = msgspec.msgpack.decode(body, type=KeysRequest)
            answer = self._posts[path](unpack_keys(asked.keys), asked)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            await send_error(send, 400, "BadRequestError", str(error))
            return
        await send_whole(send, 200, msgspec.msgpack.encode(answer), _MSGPACK)

    async def _list(self, scope: Scope, send: Send) -> None:
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("limit", ["100"])[0]
        if not asked.isdecimal() or not 1 <= int(asked) <= MAX_LISTED:
            await send_error(
                send, 400, "BadRequestError", f"limit is {asked!r}; needed: a number from 1 to {MAX_LISTED}"
            )
            return
        await send_whole(send, 200, msgspec.msgpack.encode(self._store.ls(int(asked))), _MSGPACK)
