"""The Serve deployment class: hosts one replica, or many simulated ones, behind an HTTP server of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import ray
import uvicorn
from pydantic import BaseModel, ConfigDict
from ray import serve
from starlette.types import Receive, Scope, Send

from cache_store.config import CacheConfig
from workers.config import EngineConfig, ModelConfig, PoolConfig
from workers.cores import CoreLease, lease_cores
from workers.engine import Engine
from workers.hosted import HostedReplica
from workers.messages import SECRET_HEADER

logger = logging.getLogger(__name__)


class ReplicaSpec(BaseModel):
    """What a replica is made from. Any change of it restarts the replicas."""

    model_config = ConfigDict(frozen=True)

    model: ModelConfig
    engine: EngineConfig
    pool: PoolConfig
    cache: CacheConfig
    secret: str


class Replica:
    """Deployment class. Requests of clients come over the replica's own HTTP server, forwarded by a router; Serve
    sees handle calls alone, so the replica counts its requests itself, for draining and for autoscaling."""

    async def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = ReplicaSpec.model_validate(spec)
        self._lease: CoreLease | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._hosted = self._make_hosted()
        await asyncio.gather(*(hosted.start() for hosted in self._hosted))
        host = ray.util.get_node_ip_address()
        sockets = [_bound_socket(host) for _ in self._hosted]
        node = ray.get_runtime_context().get_node_id()
        self._by_port = {
            sock.getsockname()[1]: hosted for sock, hosted in zip(sockets, self._hosted, strict=True)
        }
        self._infos = [
            hosted.describe(node, f"{host}:{port}") for port, hosted in self._by_port.items()
        ]
        await self._listen(sockets)

    def _make_hosted(self) -> list[HostedReplica]:
        spec = self._spec
        base = f"{spec.pool.role}-{serve.get_replica_context().replica_id.unique_id}"
        if spec.engine.kind == "sim":
            count = spec.engine.sim.virtual_replicas
            ids = [base] if count == 1 else [f"{base}.{index}" for index in range(count)]
        else:
            ids = [base]
        return [
            HostedReplica(replica_id, spec.pool.role, self._make_engine(), spec.cache, spec.secret)
            for replica_id in ids
        ]

    def _make_engine(self) -> Engine:
        spec = self._spec
        if spec.engine.kind == "sim":
            from workers.sim.engine import SimEngine

            return SimEngine(spec.engine, spec.model, spec.cache)
        from workers.vllm.engine import VllmEngine

        cores: tuple[int, ...] = ()
        if spec.pool.resources.cores and not spec.pool.resources.gpus:
            self._lease = lease_cores(spec.pool.resources.cores)
            cores = self._lease.cores
        return VllmEngine(spec.engine, spec.model, spec.cache, cores)

    async def _listen(self, sockets: list[socket.socket]) -> None:
        config = uvicorn.Config(
            self._dispatch,
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=75,
            ws="none",
            interface="asgi3",
        )
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._serving = asyncio.create_task(self._server._serve(sockets))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("the replica's HTTP server stopped while starting")
            await asyncio.sleep(0.01)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._by_port[scope["server"][1]].app(scope, receive, send)

    # What Serve calls.

    def record_replica_metadata(self) -> dict[str, Any]:
        return {"replicas": [msgspec.to_builtins(info) for info in self._infos]}

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"requests": float(sum(hosted.app.open_requests for hosted in self._hosted))}

    async def check_health(self) -> None:
        """Raises when an engine is dead or stuck, or when the HTTP server has stopped."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError("the replica's HTTP server has stopped")
        await asyncio.gather(*(hosted.engine.check_health() for hosted in self._hosted))

    async def __del__(self) -> None:
        left = await asyncio.gather(
            *(hosted.drain(self._spec.pool.drain_timeout_s) for hosted in getattr(self, "_hosted", ()))
        )
        if any(left):
            logger.warning("stopped with %d requests open after %.0f s", sum(left), self._spec.pool.drain_timeout_s)
        if self._server is not None:
            self._server.should_exit = True
        await asyncio.gather(*(hosted.stop() for hosted in getattr(self, "_hosted", ())), return_exceptions=True)

    # Handle calls.

    async def describe(self) -> list[dict[str, Any]]:
        """The replicas hosted here, as `ReplicaInfo` maps."""
        return self.record_replica_metadata()["replicas"]  # type: ignore[no-any-return]

    async def call(self, path: str, body: dict[str, Any], replica: str | None = None) -> Any:
        """One request to the OpenAI application, answered whole: `handle.call.remote("/v1/chat/completions", {...})`.

        `replica` names one of several hosted replicas; the router's choice where not given. Errors come as the
        server's own error object.
        """
        async with aiohttp.ClientSession() as session, session.post(**self._target(path, body, replica)) as answer:
            return await answer.json(content_type=None)

    async def stream(self, path: str, body: dict[str, Any], replica: str | None = None) -> AsyncIterator[bytes]:
        """As `call`, for a body with `stream: true`: yields the server's bytes as they come."""
        async with aiohttp.ClientSession() as session, session.post(**self._target(path, body, replica)) as answer:
            async for data in answer.content.iter_any():
                yield data

    def _target(self, path: str, body: dict[str, Any], replica: str | None) -> dict[str, Any]:
        infos = [info for info in self._infos if replica in (None, info.id)]
        if not infos:
            raise ValueError(f"replica {replica} is not hosted here; there are {[info.id for info in self._infos]}")
        return {
            "url": f"http://{infos[0].address}{path}",
            "json": body,
            "headers": {SECRET_HEADER: self._spec.secret},
            "timeout": aiohttp.ClientTimeout(total=None, connect=5),
        }


def _bound_socket(host: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, 0))
    return sock
