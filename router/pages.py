"""The pages that a router answers itself: whether it is well, and what it knows."""

from __future__ import annotations

import hmac
import io
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from router import errors
from router.asgi import Scope, read_body, send_bytes, send_json
from router.cache_admin import CacheAdmin, Serve
from router.client import Receive, Send
from router.core import RouterCore
from router.decision_log import dump
from router.draining import drain
from router.metrics import CONTENT_TYPE

RETRY_AFTER_S = 1.0

_MAX_BODY_BYTES = 64 * 1024
_READ = ("GET", "HEAD")


class Page(NamedTuple):
    """`serve` raises ApiError where it has nothing good to say."""

    methods: tuple[str, ...]
    serve: Serve


class Pages:
    """By path."""

    def __init__(
        self, core: RouterCore, describe: Callable[[], Awaitable[dict[str, Any]]], cache: CacheAdmin
    ) -> None:
        """`describe` is what `/admin/replicas` answers."""
        self.admin_key = ""
        """Bearer key of /admin; open where empty."""
        self._core = core
        self._describe = describe
        self._pages: dict[str, Page] = {
            "/healthz": Page(_READ, self._alive),
            "/health": Page(_READ, self._ready),
            "/readyz": Page(_READ, self._ready),
            "/metrics": Page(_READ, self._metrics),
            "/admin/replicas": Page(_READ, self._replicas),
            "/admin/replicas/drain": Page(("POST",), self._drain),
            "/admin/decisions": Page(_READ, self._decisions),
            **{path: Page(_READ, self._admin(serve)) for path, serve in cache.reads.items()},
            **{path: Page(("POST",), self._admin(serve)) for path, serve in cache.posts.items()},
        }

    def find(self, path: str) -> Page | None:
        return self._pages.get(path)

    async def _alive(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {"status": "alive"})

    async def _ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        ready = len(self._core.directory.ready())
        if not ready:
            raise errors.no_replica("none is ready yet", RETRY_AFTER_S)
        await send_json(send, 200, {"status": "ready", "replicas": ready})

    async def _metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, 200, self._core.metrics.render(), CONTENT_TYPE)

    async def _replicas(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._authorize(scope)
        await send_json(send, 200, await self._describe())

    async def _drain(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._authorize(scope)
        body = await read_body(receive, dict(scope["headers"]), _MAX_BODY_BYTES)
        await send_json(send, 200, {"replicas": await drain(self._core.directory, body)})

    async def _decisions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The decision log as JSON lines; `router.decision_log.load` reads it."""
        self._authorize(scope)
        buffer = io.BytesIO()
        dump(self._core.log, buffer)
        await send_bytes(send, 200, buffer.getvalue(), "application/jsonl")

    def _admin(self, serve: Serve) -> Serve:
        async def authorized(scope: Scope, receive: Receive, send: Send) -> None:
            self._authorize(scope)
            await serve(scope, receive, send)

        return authorized

    def _authorize(self, scope: Scope) -> None:
        if not self.admin_key:
            return
        shown = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(shown, b"Bearer " + self.admin_key.encode()):
            raise errors.unauthorized("/admin needs the admin key: send it as `Authorization: Bearer KEY`.")
