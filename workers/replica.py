"""The Serve deployment class: hosts one replica, or many simulated ones, behind an HTTP server of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import ray
from pydantic import BaseModel, ConfigDict
from ray import serve

from cache_store.app_server import AppServer, bound_socket
from cache_store.config import CacheConfig
from cache_store.node_address import keep_serve_on_node, node_address
from workers.config import EngineConfig, ModelConfig, PoolConfig
from workers.hosted import HostedReplica
from workers.messages import RESERVATION_HEADER, SECRET_HEADER
from workers.store_address import StoreAddress
from workers.transfer import TransferConfig

logger = logging.getLogger(__name__)
keep_serve_on_node()


class ReplicaSpec(BaseModel):
    """What a replica is made from. Any change of it restarts the replicas."""

    model_config = ConfigDict(frozen=True)

    model: ModelConfig
    engine: EngineConfig
    pool: PoolConfig
    cache: CacheConfig
    secret: str
    transfer: TransferConfig | None = None
    """None where no prompt is computed by one replica for another."""


class Replica:
    """Deployment class. Requests of clients come over the replica's own HTTP server, forwarded by a router; Serve
    sees handle calls alone, so the replica counts its requests itself, for draining and for autoscaling."""

    async def __init__(self, spec: dict[str, Any]) -> None:  # type: ignore[misc]
        self._spec = ReplicaSpec.model_validate(spec)
        self._server: AppServer | None = None
        host = node_address()
        node = ray.get_runtime_context().get_node_id()
        self._cache_socket = await self._ensure_cache(node)
        self._hosted = self._make_hosted()
        await asyncio.gather(*(hosted.start() for hosted in self._hosted))
        self._server = AppServer(
            [hosted.app for hosted in self._hosted], [bound_socket(host) for _ in self._hosted]
        )
        self._infos = [
            hosted.describe(node, address)
            for hosted, address in zip(self._hosted, self._server.addresses, strict=True)
        ]
        await self._server.start()

    async def _ensure_cache(self, node: str) -> str:
        """Path of the cache actor's socket, which this node has from here on; empty where nothing is shared.

        Raises CacheSetupError when the node can't have the cache that is configured.
        """
        spec = self._spec
        # A simulated engine has no KV to give.
        if spec.cache.share == "off" or spec.engine.kind == "sim":
            return ""
        from cache_store.node_actor import ensure_cache_actor

        app = serve.get_replica_context().app_name
        return (await ensure_cache_actor(app, spec.secret, spec.cache, node)).socket

    def _make_hosted(self) -> list[HostedReplica]:
        spec = self._spec
        base = f"{spec.pool.role}-{serve.get_replica_context().replica_id.unique_id}"
        if spec.engine.kind == "sim":
            count = spec.engine.sim.virtual_replicas
            ids = [base] if count == 1 else [f"{base}.{index}" for index in range(count)]
        else:
            ids = [base]
        return [self._make_one(replica_id) for replica_id in ids]

    def _make_one(self, replica_id: str) -> HostedReplica:
        spec = self._spec
        if spec.engine.kind == "sim":
            from workers.sim.engine import SimEngine

            sim = SimEngine(spec.engine, spec.model, spec.cache, transfer=spec.transfer)
            return HostedReplica(
                replica_id, spec.pool.role, sim, spec.cache, spec.secret, loses=sim.faults.take_lost_delta
            )
        from workers.vllm.engine import VllmEngine

        store = None
        if self._cache_socket:
            store = StoreAddress(self._cache_socket, replica_id, spec.cache.load_when)
        engine = VllmEngine(
            spec.engine,
            spec.model,
            spec.cache,
            spec.pool.resources.cores,
            store,
            spec.transfer,
            node_address(),
        )
        return HostedReplica(replica_id, spec.pool.role, engine, spec.cache, spec.secret)

    # What Serve calls.

    def record_replica_metadata(self) -> dict[str, Any]:
        return {"replicas": [msgspec.to_builtins(info) for info in self._infos]}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"requests": float(sum(hosted.app.open_requests for hosted in self._hosted))}

    async def check_health(self) -> None:
        """Raises when an engine is dead or stuck, or when the HTTP server has stopped."""
        if self._server is not None and self._server.stopped:
            raise RuntimeError("the replica's HTTP server has stopped")
        checks = (hosted.engine.check_health() for hosted in self._hosted)
        found = zip(self._hosted, await asyncio.gather(*checks, return_exceptions=True), strict=True)
        errors = {hosted.id: error for hosted, error in found if error is not None}
        for hosted in self._hosted:
            hosted.sick = hosted.id in errors
        for error in errors.values():
            raise error

    async def __del__(self) -> None:
        # What waits for a sick engine is not going to end; cut off, a router tries it elsewhere.
        left = await asyncio.gather(
            *(
                hosted.drain(0 if hosted.sick else self._spec.pool.drain_timeout_s)
                for hosted in getattr(self, "_hosted", ())
            )
        )
        if any(left):
            logger.warning(
                "stopped with %d requests open after %.0f s", sum(left), self._spec.pool.drain_timeout_s
            )
        if self._server is not None:
            self._server.begin_stop()
        await asyncio.gather(
            *(hosted.stop() for hosted in getattr(self, "_hosted", ())), return_exceptions=True
        )

    # Handle calls.

    async def describe(self) -> list[dict[str, Any]]:
        """The replicas hosted here, as `ReplicaInfo` maps."""
        return self.record_replica_metadata()["replicas"]  # type: ignore[no-any-return]

    async def call(
        self, path: str, body: dict[str, Any], replica: str | None = None, reservation: str | None = None
    ) -> Any:
        """One request to the OpenAI application, answered whole: `handle.call.remote("/v1/chat/completions", {...})`.

        `replica` names one of several hosted replicas; the router's choice where not given. `reservation` is the
        router's, and given by Serve's request router. Errors come as the server's own error object.
        """
        async with (
            aiohttp.ClientSession() as session,
            session.post(**self._target(path, body, replica, reservation)) as answer,
        ):
            return await answer.json(content_type=None)

    async def stream(
        self, path: str, body: dict[str, Any], replica: str | None = None, reservation: str | None = None
    ) -> AsyncIterator[bytes]:
        """As `call`, for a body with `stream: true`: yields the server's bytes as they come."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(**self._target(path, body, replica, reservation)) as answer,
        ):
            async for data in answer.content.iter_any():
                yield data

    def _target(
        self, path: str, body: dict[str, Any], replica: str | None, reservation: str | None
    ) -> dict[str, Any]:
        infos = [info for info in self._infos if replica in (None, info.id)]
        if not infos:
            raise ValueError(
                f"replica {replica} is not hosted here; there are {[info.id for info in self._infos]}"
            )
        headers = {SECRET_HEADER: self._spec.secret}
        if reservation is not None:
            headers[RESERVATION_HEADER] = reservation
        return {
            "url": f"http://{infos[0].address}{path}",
            "json": body,
            "headers": headers,
            "timeout": aiohttp.ClientTimeout(total=None, connect=5),
        }
