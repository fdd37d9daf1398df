"""The router's HTTP face: pure ASGI, from a client's request to the end of its answer."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from router import errors, routes
from router.admission import QueueFullError, QueueTimeoutError
from router.asgi import Scope, below_root, check_method, read_body, send_error, serve_lifespan
from router.cache_admin import CacheAdmin
from router.client import ClientGone, ClientStalled, ClientWatch, Receive, Send
from router.core import Placed, Query, RouterCore
from router.decision_log import Measured
from router.errors import ApiError
from router.exchange import Exchange
from router.first_half import Ends
from router.halves import Half
from router.headers import ResponseHead, parse_cached
from router.ledger import Reservation
from router.pages import RETRY_AFTER_S, Pages
from router.relay import Relay
from router.render import Renderer
from router.session import session_of
from router.stored_responses import find_holder
from router.tenants import Tenants, resolve_key, salt
from router.upstream import Address, ConnectFailed, UpstreamError, UpstreamTimeout
from workers.messages import (
    CACHED_HEADER,
    LENGTHS_HEADER,
    PLAN_HEADER,
    PREFILL_HEADER,
    REPLICA_HEADER,
    REQUEST_ID_HEADER,
    RESERVATION_HEADER,
    SALT_HEADER,
    SECRET_HEADER,
    Plan,
    ReplicaInfo,
    pack_plan,
    pack_prompts,
    pack_reservation,
)

logger = logging.getLogger(__name__)

_RETRIED_STATUSES = frozenset({500, 502, 503})
"""Before a first token these speak of the replica, not of the request."""
_CLIENT_GONE = 499
_WAKE_PERIOD_S = 1.0
_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
"""What of a client's x-request-id is taken over: it is kept in the decision log and written to logs."""


@dataclass
class _Answer:
    """What became of one request, for metrics and the decision log."""

    began: float
    status: int = _CLIENT_GONE
    begun: bool = False
    """The client may have seen some of it."""
    first_token_at: float | None = None
    served_s: float | None = None
    """From the last decision to the first token."""
    cached_tokens: int = 0
    prefill: str = ""
    """Value of `x-manta-prefill`; empty in a cluster without a prefill pool."""


class RouterApp:
    """ASGI application of one router."""

    def __init__(
        self,
        core: RouterCore,
        renderer: Renderer,
        secret: str,
        models: tuple[str, ...],
        wake: Callable[[], Awaitable[None]],
        describe: Callable[[], Awaitable[dict[str, Any]]],
        env: dict[str, str],
    ) -> None:
        """`models`: names that clients may ask for. `wake` asks for a replica where there is none; it is called every
        second while requests wait for one. `describe` is what `/admin/replicas` answers."""
        self._core = core
        self._renderer = renderer
        self._secret = secret
        self._models = models
        self._wake = wake
        self._waking: asyncio.Task[None] | None = None
        self._env = env
        self._relay = Relay(core.config.limits)
        self._ends = Ends(self._relay, secret)
        self._pages = Pages(core, describe, CacheAdmin(core, self._query, self._run))
        self._tenants: Tenants
        self.configure()

    def configure(self) -> None:
        """Take over limits, tenants and the admin key from the core's configuration. Raises TenantError."""
        config = self._core.config
        tenants = Tenants(config.tenants, self._env)
        admin_key = resolve_key(config.admin_key, "router.admin_key", self._env) if config.admin_key else ""
        self._tenants, self._pages.admin_key, self._relay.limits = tenants, admin_key, config.limits

    async def close(self) -> None:
        """End what runs by itself. Requests under way are their callers' to end."""
        if self._waking is not None:
            self._waking.cancel()
        self._ends.close()
        self._relay.close()
        await self._core.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await serve_lifespan(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        scope = below_root(scope)
        path, method = scope["path"], scope["method"]
        page, route = self._pages.find(path), routes.find(path)
        answer = _Answer(time.monotonic())
        try:
            if page is not None:
                check_method(method, page.methods)
                await page.serve(scope, receive, send)
            elif route is not None:
                check_method(method, route[1])
                await self._serve(scope, receive, send, answer)
            else:
                raise errors.not_found(path)
        except ApiError as error:
            answer.status, error.anthropic = error.status, routes.is_anthropic(path)
            await send_error(send, error)
        except (ClientGone, ClientStalled):
            pass
        except Exception as error:
            if answer.begun:  # an answer that can't be completed is cut, which this makes the server do
                raise
            answer.status = 500
            logger.exception("a request to %.200r failed", path)
            await send_error(send, errors.internal(type(error).__name__))
        finally:
            if page is None:
                name = route[0] if route is not None else path
                self._core.metrics.answered(name, answer.status, time.monotonic() - answer.began)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, answer: _Answer) -> None:
        headers = dict(scope["headers"])
        tenant = self._tenants.authenticate(headers.get(b"authorization"), headers.get(b"x-api-key"))
        body = await read_body(receive, headers, self._core.config.limits.max_body_bytes)
        query = await self._query(scope["path"], body, tenant, headers)
        await self._run(scope, body, query, receive, send, answer)

    async def _run(
        self,
        scope: Scope,
        body: bytes,
        query: Query,
        receive: Receive,
        send: Send,
        answer: _Answer | None = None,
    ) -> None:
        # From here on the client sends nothing more, and leaving is all that it can do.
        with ClientWatch(receive) as watch:
            answer = answer or _Answer(time.monotonic())
            await watch.unless_gone(self._answer(scope, body, query, send, answer))

    async def _query(self, path: str, body: bytes, tenant: str, headers: dict[bytes, bytes]) -> Query:
        rendered = await self._renderer.render(path, body)
        if rendered.model and rendered.model not in self._models:
            raise errors.unknown_model(rendered.model, self._models)
        if rendered.prompts is None and rendered.reason != "path":
            self._core.metrics.not_rendered(rendered.reason)
        given_id = headers.get(b"x-request-id", b"")
        query = Query(
            request_id=given_id.decode() if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex,
            model=rendered.model or "",
            rendered=rendered,
            salt=salt(tenant, rendered.client_salt, self._secret),
            body_bytes=len(body),
            tenant=tenant,
            session=session_of(headers, body) if self._core.config.policy.wants_session else "",
        )
        stored = routes.stored_response(path)
        response = stored or rendered.previous_response_id
        if response is not None:
            query.new_work = stored is None
            holder = await find_holder(self._core.directory, response, query.salt, query.new_work)
            if holder is None:
                raise errors.unknown_response(response)
            query.only = holder
        return query

    async def _answer(self, scope: Scope, body: bytes, query: Query, send: Send, answer: _Answer) -> None:
        """Place the request, and again elsewhere while replicas fail before their first token."""
        attempts_left = self._core.config.limits.max_attempts
        while True:
            attempts_left -= 1
            placed = await self._place(query)
            # No await between a place and the `try` that gives it back.
            answer.status = _CLIENT_GONE
            half = (
                Half(placed.prefill, self._ends, self._core.metrics) if placed.prefill is not None else None
            )
            try:
                if half is None:
                    self._stays_local(query, placed)
                elif not await self._first_half(scope, body, query, placed, half, send, answer):
                    return
                with closing(self._exchange(scope, body, query, placed, half)) as exchange:
                    head = await self._start(exchange, query, placed, attempts_left, answer)
                    if head is not None:
                        self._begun(query, placed, head, answer, half)
                        await self._stream(exchange, placed, head, send, answer)
                        return
            finally:
                if half is not None:
                    half.close()
                self._core.release(placed, _measured(answer))
            self._core.metrics.retried()

    def _stays_local(self, query: Query, placed: Placed) -> None:
        """Raises ApiError 503 where a prompt is for the prefill pool, and nothing else will do."""
        if not placed.local:
            return
        self._core.metrics.stayed_local(placed.local)
        if placed.local != "no_prefill":
            return
        self._keep_waking()
        config = self._core.config.prefill
        least = 0 if config.when == "always" else config.min_tokens
        if config.on_no_prefill == "reject" and least is not None and query.prompt_tokens >= least:
            raise errors.no_replica("none of the prefill pool is ready", RETRY_AFTER_S)

    async def _first_half(
        self, scope: Scope, body: bytes, query: Query, placed: Placed, half: Half, send: Send, answer: _Answer
    ) -> bool:
        """Have the prompt computed; where that fails, whoever answers computes it. False where the client has its
        answer: an error that no replica would spare it."""
        with closing(self._first_exchange(scope, body, query, half)) as exchange:
            if not await half.compute(exchange):
                assert exchange.head is not None
                answer.status, answer.begun = exchange.head.status, True
                await exchange.stream(send, [(REPLICA_HEADER.encode(), half.place.replica.id.encode())])
                return False
        if half.failure is not None:
            self._core.metrics.upstream_failed(half.failure.reason)
            if half.failure.reason == "connect":
                self._core.directory.suspect(half.place.replica.id)
        else:
            self._core.prefilled(placed)
        return True

    async def _place(self, query: Query) -> Placed:
        """Wait for a place, bounded. Raises ApiError 429 when it is too full, 503 when there is no replica."""
        limits = self._core.config.limits
        if not self._core.has_candidates(query):
            self._keep_waking()
        try:
            return await self._core.room.enter(
                lambda: self._core.place(query, in_halves=True),
                limits.queue_timeout_s,
                wants=(query.model, query.only, frozenset(query.tried)),
            )
        except QueueFullError as error:
            self._core.metrics.not_decided("queue_full")
            raise errors.queue_full(str(error), error.retry_after_s) from error
        except QueueTimeoutError as error:
            if self._core.has_candidates(query):
                self._core.metrics.not_decided("queue_timeout")
                raise errors.queue_full(str(error), error.retry_after_s) from error
            self._core.metrics.not_decided("no_replica")
            raise errors.no_replica(
                f"none was ready within {limits.queue_timeout_s:g} s", RETRY_AFTER_S
            ) from error

    def _keep_waking(self) -> None:
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._wake_while_waiting())

    async def _wake_while_waiting(self) -> None:
        """One call is not enough: it may fail, or what it started may stop again before it was ready."""
        while True:
            try:
                await self._wake()
            except Exception:
                logger.warning("asking for a replica failed", exc_info=True)
            await asyncio.sleep(_WAKE_PERIOD_S)
            if not len(self._core.room) or self._core.directory.ready():
                return

    def _exchange(
        self, scope: Scope, body: bytes, query: Query, placed: Placed, half: Half | None = None
    ) -> Exchange:
        limit = None if query.rendered.stream else self._core.config.limits.answer_timeout_s
        body, internal = self._internal(body, query, placed.reservation, placed.plan)
        if half is not None:
            body, headers = half.for_second(body)
            internal |= headers
        return self._exchange_with(scope, body, placed.replica, internal, limit)

    def _first_exchange(self, scope: Scope, body: bytes, query: Query, half: Half) -> Exchange:
        place = half.place
        body, internal = self._internal(body, query, place.reservation, place.plan)
        internal |= [half.header]
        return self._exchange_with(scope, body, place.replica, internal, self._core.config.prefill.timeout_s)

    def _internal(
        self, body: bytes, query: Query, reservation: Reservation, plan: Plan | None
    ) -> tuple[bytes, dict[str, str]]:
        """The body for a replica, and the router's own headers."""
        internal = {
            SECRET_HEADER: self._secret,
            REQUEST_ID_HEADER: query.request_id,
            SALT_HEADER: query.salt,
            RESERVATION_HEADER: pack_reservation(reservation.name),
        }
        if query.rendered.prompts is not None:
            body, internal[LENGTHS_HEADER] = pack_prompts(body, query.rendered.prompts)
        if plan is not None:
            internal[PLAN_HEADER] = pack_plan(plan)
        return body, internal

    def _exchange_with(
        self, scope: Scope, body: bytes, replica: ReplicaInfo, internal: dict[str, str], limit_s: float | None
    ) -> Exchange:
        try:
            return self._relay.exchange(
                scope,
                body,
                Address.parse(replica.address),
                internal=[(name.encode(), value.encode("latin-1")) for name, value in internal.items()],
                first_token_timeout_s=limit_s,
            )
        except ValueError as error:
            raise errors.bad_request(str(error)) from error

    async def _start(
        self, exchange: Exchange, query: Query, placed: Placed, attempts_left: int, answer: _Answer
    ) -> ResponseHead | None:
        """The head to answer with; None when the replica failed and another one may be tried.

        Raises ApiError when no other may.
        """
        try:
            head = await exchange.start()
        except UpstreamError as error:
            self._note_failure(placed, error)
            if isinstance(error, UpstreamTimeout):
                answer.status = 504
                raise self._timed_out(query) from error
            answer.status = 502
            if not self._has_another(query, placed, attempts_left):
                raise errors.upstream_failed(str(error)) from error
            return None
        if head.status in _RETRIED_STATUSES and self._has_another(query, placed, attempts_left):
            answer.status = head.status
            self._core.metrics.upstream_failed("Refused")
            logger.warning("replica %s answered %d", placed.replica.id, head.status)
            return None
        return head

    def _has_another(self, query: Query, placed: Placed, attempts_left: int) -> bool:
        query.tried.add(placed.replica.id)
        return attempts_left > 0 and self._core.has_candidates(query)

    def _begun(
        self, query: Query, placed: Placed, head: ResponseHead, answer: _Answer, half: Half | None
    ) -> None:
        answer.status, answer.begun = head.status, True
        if head.cached is None:
            placed.reservation.first_token()
            return
        tokens = parse_cached(head.cached)
        if half is not None:
            answer.prefill = half.answered(tokens.get("nixl", 0))
        elif placed.local:
            answer.prefill = "local"
        # The head of a whole answer comes with its last token.
        answer.served_s = self._core.computed(placed, tokens, query.rendered.stream)
        computed = tokens.pop("computed", 0)
        answer.cached_tokens = sum(tokens.values())
        self._core.metrics.prompt_served(answer.cached_tokens, computed)
        if query.rendered.stream:
            answer.first_token_at = time.monotonic()
            self._core.metrics.first_token(answer.first_token_at - answer.began)

    async def _stream(
        self, exchange: Exchange, placed: Placed, head: ResponseHead, send: Send, answer: _Answer
    ) -> None:
        try:
            await exchange.stream(send, _answer_headers(placed, head, answer.prefill))
        except UpstreamError as error:
            self._note_failure(placed, error)
            raise

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


def _answer_headers(placed: Placed, head: ResponseHead, prefill: str) -> list[tuple[bytes, bytes]]:
    headers = [(REPLICA_HEADER.encode(), placed.replica.id.encode())]
    if head.cached is not None:
        headers.append((CACHED_HEADER.encode(), head.cached.encode("latin-1")))
    if prefill:
        headers.append((PREFILL_HEADER.encode(), prefill.encode()))
    return headers


def _measured(answer: _Answer) -> Measured:
    now = time.monotonic()
    ttft = answer.first_token_at - answer.began if answer.first_token_at is not None else None
    return Measured(answer.status, answer.cached_tokens, ttft, now - answer.began, answer.served_s)
