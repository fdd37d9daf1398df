"""Ray Serve's seam: makes handle calls choose as HTTP does, and tells the router which replicas Serve runs.

Serve makes one `MantaRequestRouter` per handle process and deployment. In a router's own process it feeds the
router's directory from Serve's replica list. Elsewhere it asks the router deployment to decide, so that all
reservations stand in one place.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from ray import serve
from ray.serve._private.constants import RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from router.shared_core import DEPLOYMENT, shared
from workers.messages import ReplicaInfo

logger = logging.getLogger(__name__)

ROUTED_METHODS = frozenset({"call", "stream"})
_CHOICE_TIMEOUT_S = 5.0


class MantaRequestRouter(RequestRouter):
    """Request router of a worker deployment."""

    def initialize_state(self, app: str, pool: str) -> None:
        self._app = app
        self._pool = pool
        self._tickets: dict[str, str] = {}
        self._hosts: dict[str, ReplicaID] = {}
        self._background: set[asyncio.Future[Any]] = set()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        infos = []
        self._hosts = {}
        for replica in replicas:
            for item in (replica.replica_metadata or {}).get("replicas", ()):
                info = msgspec.convert(item, ReplicaInfo)
                infos.append(info)
                self._hosts[info.id] = replica.replica_id
        local = shared(self._app)
        if local is not None:
            local.loop.call_soon_threadsafe(local.core.set_pool, self._pool, infos)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or pending_request.metadata.call_method not in ROUTED_METHODS:
            return [candidate_replicas]
        try:
            chosen = await asyncio.wait_for(self._decide(pending_request), _CHOICE_TIMEOUT_S)
        except Exception as error:
            logger.warning("the router could not choose for a handle call, any replica will do: %r", error)
            return [candidate_replicas]
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if chosen is None or chosen not in by_id:
            return [candidate_replicas]
        return [[by_id[chosen]]]

    async def _decide(self, request: PendingRequest) -> ReplicaID | None:
        path, body = _arguments(request)
        local = shared(self._app)
        if local is None:
            found = await self._ask_router("choose", path, body)
        elif local.loop is asyncio.get_running_loop():
            found = await local.choices.choose(path, body)
        else:
            deciding = asyncio.run_coroutine_threadsafe(local.choices.choose(path, body), local.loop)
            found = await asyncio.wrap_future(deciding)
        if found is None:
            return None
        ticket, replica = found
        self._release(self._tickets.pop(request.metadata.internal_request_id, ""))
        self._tickets[request.metadata.internal_request_id] = ticket
        request.kwargs.update(replica=replica, reservation=ticket)
        return self._hosts.get(replica)

    async def _ask_router(self, method: str, *args: Any) -> Any:
        """Call the router deployment from a process that is none of its replicas."""
        if not RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP:
            handle = serve.get_deployment_handle(DEPLOYMENT, self._app)
            return await getattr(handle, method).remote(*args)

        def ask() -> Any:
            handle = serve.get_deployment_handle(DEPLOYMENT, self._app)
            return getattr(handle, method).remote(*args).result(timeout_s=_CHOICE_TIMEOUT_S)

        # All handles of a process share this loop, and a new handle blocks its caller until the loop has made it.
        return await asyncio.to_thread(ask)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._release(self._tickets.pop(internal_request_id, ""))

    def _release(self, ticket: str) -> None:
        if not ticket:
            return
        local = shared(self._app)
        if local is None:
            task = asyncio.ensure_future(self._ask_router("release", ticket))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
        else:
            local.loop.call_soon_threadsafe(local.choices.release, ticket)


def _arguments(request: PendingRequest) -> tuple[str, dict[str, Any]]:
    """Path and body of a handle call, however they were passed. Raises LookupError when one is missing."""
    args = list(request.args)
    path = request.kwargs.get("path") or args.pop(0)
    body = request.kwargs.get("body") or args.pop(0)
    return path, body
