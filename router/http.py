"""The router's HTTP face: pure ASGI, from a client's request to the end of its answer."""

from __future__ import annotations

import hmac
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from router import errors
from router.admission import QueueFullError, QueueTimeoutError
from router.client import ClientGone, ClientStalled, ClientWatch, Receive, Send
from router.core import Placed, Query, RouterCore
from router.decision_log import Measured
from router.errors import ApiError
from router.exchange import Exchange
from router.headers import ResponseHead
from router.metrics import CONTENT_TYPE
from router.relay import Relay
from router.render import Renderer
from router.tenants import Tenants, resolve_key, salt
from router.upstream import Address, ConnectFailed, UpstreamError, UpstreamTimeout
from workers.messages import (
    CACHED_HEADER,
    LENGTHS_HEADER,
    REPLICA_HEADER,
    REQUEST_ID_HEADER,
    SALT_HEADER,
    SECRET_HEADER,
    pack_prompts,
)

logger = logging.getLogger(__name__)

Scope = dict[str, Any]

FORWARDED = {
    "/v1/chat/completions": ("POST",),
    "/v1/completions": ("POST",),
    "/v1/responses": ("POST",),
    "/v1/messages": ("POST",),
    "/v1/embeddings": ("POST",),
    "/v1/models": ("GET",),
    "/tokenize": ("POST",),
    "/detokenize": ("POST",),
    "/version": ("GET",),
}
_RETRIED_STATUSES = frozenset({500, 502, 503})
"""Before a first token these speak of the replica, not of the request."""
_CLIENT_GONE = 499
_RETRY_AFTER_S = 1.0


@dataclass
class _Answer:
    """What became of one request, for metrics and the decision log."""

    began: float
    status: int = _CLIENT_GONE
    first_token_at: float | None = None
    cached_tokens: int = 0


class RouterApp:
    """ASGI application of one router."""

    def __init__(
        self,
        core: RouterCore,
        renderer: Renderer,
        secret: str,
        models: tuple[str, ...],
        wake: Callable[[], Awaitable[None]],
        env: dict[str, str],
    ) -> None:
        """`models`: names that clients may ask for. `wake` asks for a replica where there is none."""
        self._core = core
        self._renderer = renderer
        self._secret = secret
        self._models = models
        self._wake = wake
        self._env = env
        self._relay = Relay(core.config.limits)
        self._tenants: Tenants
        self._admin_key = ""
        self.configure()
        self._own: dict[str, Callable[[Scope, Send], Awaitable[None]]] = {
            "/healthz": self._healthz,
            "/health": self._readyz,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
            "/admin/replicas": self._admin_replicas,
            "/admin/decisions": self._admin_decisions,
        }

    def configure(self) -> None:
        """Take over tenants and the admin key from the core's configuration. Raises TenantError."""
        config = self._core.config
        self._relay.limits = config.limits
        self._tenants = Tenants(config.tenants, self._env)
        self._admin_key = (
            resolve_key(config.admin_key, "router.admin_key", self._env) if config.admin_key else ""
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        path, method = scope["path"], scope["method"]
        answer = _Answer(time.monotonic())
        try:
            own = self._own.get(path)
            if own is not None:
                _check_method(method, ("GET", "HEAD"))
                answer.status = 200
                await own(scope, send)
            elif path in FORWARDED or path.startswith("/v1/"):
                _check_method(method, FORWARDED.get(path, ("GET", "POST")))
                await self._serve(scope, receive, send, answer)
            else:
                raise errors.not_found(path)
        except ApiError as error:
            answer.status = error.status
            await _send_error(send, error)
        except (ClientGone, ClientStalled):
            answer.status = _CLIENT_GONE
        finally:
            if path in FORWARDED:
                self._core.metrics.answered(path, answer.status, time.monotonic() - answer.began)

    # Requests that a replica answers.

    async def _serve(self, scope: Scope, receive: Receive, send: Send, answer: _Answer) -> None:
        headers = dict(scope["headers"])
        tenant = self._tenants.authenticate(headers.get(b"authorization"), headers.get(b"x-api-key"))
        body = await _read_body(receive, headers, self._core.config.limits.max_body_bytes)
        query = await self._query(scope["path"], body, tenant, headers)
        # From here on the client sends nothing more, and leaving is all that it can do.
        with ClientWatch(receive) as watch:
            await watch.unless_gone(self._answer(scope, body, query, send, answer))

    async def _query(self, path: str, body: bytes, tenant: str, headers: dict[bytes, bytes]) -> Query:
        rendered = await self._renderer.render(path, body)
        if rendered.model and rendered.model not in self._models:
            raise errors.unknown_model(rendered.model, self._models)
        if rendered.prompts is None and rendered.reason != "path":
            self._core.metrics.not_rendered(rendered.reason)
        return Query(
            request_id=headers.get(b"x-request-id", b"").decode("latin-1") or uuid.uuid4().hex,
            model=rendered.model or "",
            rendered=rendered,
            salt=salt(tenant, rendered.client_salt, self._secret),
            body_bytes=len(body),
        )

    async def _answer(self, scope: Scope, body: bytes, query: Query, send: Send, answer: _Answer) -> None:
        """Place the request, and again elsewhere while replicas fail before their first token."""
        attempts = self._core.config.limits.max_attempts
        for attempt in range(1, attempts + 1):
            placed = await self._place(query)
            began_here = False
            try:
                exchange = self._exchange(scope, body, query, placed)
                try:
                    head = await exchange.start()
                    if head.status in _RETRIED_STATUSES and attempt < attempts and self._can_retry(query, placed):
                        raise _RefusedError(Address.parse(placed.replica.address), head.status)
                    began_here = True
                    self._begun(placed, head, answer)
                    await exchange.stream(send, _answer_headers(placed, head))
                    return
                except UpstreamError as error:
                    self._note_failure(placed, error)
                    if began_here:
                        raise
                    query.tried.add(placed.replica.id)
                    if isinstance(error, UpstreamTimeout):
                        raise self._timed_out(query) from error
                    if attempt == attempts or not self._core.has_candidates(query):
                        raise errors.upstream_failed(str(error)) from error
                    self._core.metrics.retried()
                finally:
                    exchange.close()
            finally:
                self._core.release(placed, _measured(answer))

    async def _place(self, query: Query) -> Placed:
        """Wait for a place, bounded. Raises ApiError 429 when it is too full, 503 when there is no replica."""
        limits = self._core.config.limits
        if not query.tried and not self._core.has_candidates(query):
            await self._wake()
        try:
            return await self._core.room.enter(lambda: self._core.place(query), limits.queue_timeout_s)
        except QueueFullError as error:
            self._core.metrics.not_decided("queue_full")
            raise errors.queue_full(str(error), error.retry_after_s) from error
        except QueueTimeoutError as error:
            if self._core.has_candidates(query):
                self._core.metrics.not_decided("queue_timeout")
                raise errors.queue_full(str(error), error.retry_after_s) from error
            self._core.metrics.not_decided("no_replica")
            raise errors.no_replica(
                f"none was ready within {limits.queue_timeout_s:g} s", _RETRY_AFTER_S
            ) from error

    def _exchange(self, scope: Scope, body: bytes, query: Query, placed: Placed) -> Exchange:
        internal = {SECRET_HEADER: self._secret, REQUEST_ID_HEADER: query.request_id, SALT_HEADER: query.salt}
        if query.rendered.prompts is not None:
            body, internal[LENGTHS_HEADER] = pack_prompts(body, query.rendered.prompts)
        limits = self._core.config.limits
        try:
            return self._relay.exchange(
                scope,
                body,
                Address.parse(placed.replica.address),
                internal=[(name.encode(), value.encode("latin-1")) for name, value in internal.items()],
                first_token_timeout_s=None if query.rendered.stream else limits.answer_timeout_s,
            )
        except ValueError as error:
            raise errors.bad_request(str(error)) from error

    def _begun(self, placed: Placed, head: ResponseHead, answer: _Answer) -> None:
        answer.status = head.status
        answer.first_token_at = time.monotonic()
        placed.reservation.first_token()
        if head.cached is not None:
            tokens = parse_cached(head.cached)
            computed = tokens.pop("computed", 0)
            answer.cached_tokens = sum(tokens.values())
            self._core.metrics.first_token(answer.first_token_at - answer.began)
            self._core.metrics.prompt_served(answer.cached_tokens, computed)

    def _can_retry(self, query: Query, placed: Placed) -> bool:
        query.tried.add(placed.replica.id)
        return self._core.has_candidates(query)

    def _timed_out(self, query: Query) -> ApiError:
        limits = self._core.config.limits
        if query.rendered.stream:
            return errors.upstream_timeout("first token", limits.first_token_timeout_s)
        return errors.upstream_timeout("answer", limits.answer_timeout_s)

    def _note_failure(self, placed: Placed, error: UpstreamError) -> None:
        self._core.metrics.upstream_failed(type(error).__name__)
        logger.warning("replica %s failed: %s", placed.replica.id, error)
        if isinstance(error, ConnectFailed):
            self._core.directory.suspect(placed.replica.id)

    # The router's own pages.

    async def _healthz(self, scope: Scope, send: Send) -> None:
        await _send_json(send, 200, {"status": "alive"})

    async def _readyz(self, scope: Scope, send: Send) -> None:
        ready = len(self._core.directory.ready())
        if not ready:
            raise errors.no_replica("none is ready yet", _RETRY_AFTER_S)
        await _send_json(send, 200, {"status": "ready", "replicas": ready})

    async def _metrics(self, scope: Scope, send: Send) -> None:
        await _send_bytes(send, 200, self._core.metrics.render(), CONTENT_TYPE)

    async def _admin_replicas(self, scope: Scope, send: Send) -> None:
        self._authorize_admin(scope)
        await _send_json(send, 200, self.describe())

    async def _admin_decisions(self, scope: Scope, send: Send) -> None:
        """The decision log as JSON lines; `router.decision_log.load` reads it."""
        self._authorize_admin(scope)
        import io

        from router.decision_log import dump

        buffer = io.BytesIO()
        dump(self._core.log, buffer)
        await _send_bytes(send, 200, buffer.getvalue(), "application/jsonl")

    def describe(self) -> dict[str, Any]:
        """What this router knows, as `manta status` shows it."""
        directory = self._core.directory
        index = self._core.index.stats().get("hbm")
        replicas = [
            {
                "id": entry.info.id,
                "role": entry.info.role,
                "node": entry.info.node,
                "address": entry.info.address,
                "state": directory.state(entry),
                "waiting": entry.load.waiting if entry.load else 0,
                "running": entry.load.running if entry.load else 0,
                "kv_used": entry.load.kv_used if entry.load else 0.0,
                "chunks": index.chunks.get(entry.info.id, 0) if index else 0,
                "snapshots": entry.snapshots,
                "prefill_rate": entry.load.prefill_rate if entry.load else 0.0,
                "decode_rate": entry.load.decode_rate if entry.load else 0.0,
            }
            for entry in directory
        ]
        return {"ready": any(r["state"] == "ready" for r in replicas), "models": self._models, "replicas": replicas}

    def _authorize_admin(self, scope: Scope) -> None:
        if not self._admin_key:
            return
        shown = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(shown, b"Bearer " + self._admin_key.encode()):
            raise errors.unauthorized("/admin needs the admin key: send it as `Authorization: Bearer KEY`.")


class _RefusedError(UpstreamError):
    """The replica answered that it can't serve."""

    def __init__(self, address: Address, status: int) -> None:
        super().__init__(address, f"answered {status}", response_started=True)


def parse_cached(header: str) -> dict[str, int]:
    """`hbm=512,computed=98` as a map. What is not of that form is left out."""
    tokens: dict[str, int] = {}
    for part in header.split(","):
        tier, _, count = part.partition("=")
        if count.isdigit():
            tokens[tier] = int(count)
    return tokens


def _answer_headers(placed: Placed, head: ResponseHead) -> list[tuple[bytes, bytes]]:
    headers = [(REPLICA_HEADER.encode(), placed.replica.id.encode())]
    if head.cached is not None:
        headers.append((CACHED_HEADER.encode(), head.cached.encode("latin-1")))
    return headers


def _measured(answer: _Answer) -> Measured:
    now = time.monotonic()
    ttft = answer.first_token_at - answer.began if answer.first_token_at is not None else None
    return Measured(answer.status, answer.cached_tokens, ttft, now - answer.began)


def _check_method(method: str, allowed: tuple[str, ...]) -> None:
    if method not in allowed:
        raise errors.method_not_allowed(method, allowed)


async def _read_body(receive: Receive, headers: dict[bytes, bytes], limit: int) -> bytes:
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        raise errors.body_too_large(limit, int(length))
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left before its request was complete")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise errors.body_too_large(limit)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_error(send: Send, error: ApiError) -> None:
    await send({"type": "http.response.start", "status": error.status, "headers": error.headers()})
    await send({"type": "http.response.body", "body": error.body()})


async def _send_json(send: Send, status: int, value: Any) -> None:
    await _send_bytes(send, status, json.dumps(value).encode(), "application/json")


async def _send_bytes(send: Send, status: int, body: bytes, content_type: str) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
