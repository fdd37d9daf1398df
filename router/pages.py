"""The pages that a router answers itself: whether it is well, and what it knows."""

from __future__ import annotations

import hmac
import io
from collections.abc import Awaitable, Callable
from typing import Any

from router import errors
from router.asgi import Scope, send_bytes, send_json
from router.client import Send
from router.core import RouterCore
from router.decision_log import dump
from router.metrics import CONTENT_TYPE

RETRY_AFTER_S = 1.0

Page = Callable[[Scope, Send], Awaitable[None]]


class Pages:
    """By path; all of them take GET and HEAD."""

    def __init__(self, core: RouterCore, describe: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """`describe` is what `/admin/replicas` answers."""
        self.admin_key = ""
        """Bearer key of /admin; open where empty."""
        self._core = core
        self._describe = describe
        self._pages: dict[str, Page] = {
            "/healthz": self._alive,
            "/health": self._ready,
            "/readyz": self._ready,
            "/metrics": self._metrics,
            "/admin/replicas": self._replicas,
            "/admin/decisions": self._decisions,
        }

    def find(self, path: str) -> Page | None:
        """A page raises ApiError where it has nothing good to say."""
        return self._pages.get(path)

    async def _alive(self, scope: Scope, send: Send) -> None:
        await send_json(send, 200, {"status": "alive"})

    async def _ready(self, scope: Scope, send: Send) -> None:
        ready = len(self._core.directory.ready())
        if not ready:
            raise errors.no_replica("none is ready yet", RETRY_AFTER_S)
        await send_json(send, 200, {"status": "ready", "replicas": ready})

    async def _metrics(self, scope: Scope, send: Send) -> None:
        await send_bytes(send, 200, self._core.metrics.render(), CONTENT_TYPE)

    async def _replicas(self, scope: Scope, send: Send) -> None:
        self._authorize(scope)
        await send_json(send, 200, await self._describe())

    async def _decisions(self, scope: Scope, send: Send) -> None:
        """The decision log as JSON lines; `router.decision_log.load` reads it."""
        self._authorize(scope)
        buffer = io.BytesIO()
        dump(self._core.log, buffer)
        await send_bytes(send, 200, buffer.getvalue(), "application/jsonl")

    def _authorize(self, scope: Scope) -> None:
        if not self.admin_key:
            return
        shown = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(shown, b"Bearer " + self.admin_key.encode()):
            raise errors.unauthorized("/admin needs the admin key: send it as `Authorization: Bearer KEY`.")
