"""The Serve ingress deployment: wires a router's core to Serve and to its HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve.handle import DeploymentHandle

from cache_store.config import CacheConfig
from cache_store.node_address import keep_serve_on_node, node_address
from router.config import RouterConfig
from router.core import RouterCore
from router.http import RouterApp
from router.inventory import Inventory
from router.remote_choice import RemoteChoices
from router.render import Renderer
from router.routes import ROUTES
from router.shared_core import DEPLOYMENT, share

logger = logging.getLogger(__name__)

_FIRST_NEWS_S = 3.0
"""Longest wait for Serve to name the replicas and for these to tell; where none runs yet, it is in vain."""

keep_serve_on_node()


class RouterSpec(BaseModel):
    """What a router is made from. Any change of it restarts the routers; the rest comes by `reconfigure`."""

    model_config = ConfigDict(frozen=True)

    app: str
    endpoint: str
    """Where clients reach the cluster, for `manta status`. A `*` in it stands for the address of the router's node."""
    secret: str
    models: tuple[str, ...]
    renderer: str
    """Class that renders as the engines do, as `module:Class`; a `router.render.Renderer`."""
    renderer_args: dict[str, Any] = {}
    env: dict[str, str] = {}
    """Environment of the renderer."""
    cache: CacheConfig = CacheConfig()


@serve.ingress()
class Router:
    """Deployment class. `pools` are the handles of the worker deployments."""

    async def __init__(self, spec: dict[str, Any], *pools: DeploymentHandle) -> None:  # type: ignore[misc]
        self._spec = RouterSpec.model_validate(spec)
        self._pools = pools
        self._waking: asyncio.Task[None] | None = None
        self._core = RouterCore(RouterConfig(), self._spec.secret, ROUTES)
        renderer = _renderer(self._spec)
        await renderer.start()
        endpoint = endpoint_on(self._spec.endpoint, node_address())
        inventory = Inventory(self._core, self._spec.app, DEPLOYMENT, endpoint)
        self._app = RouterApp(
            self._core,
            renderer,
            self._spec.secret,
            self._spec.models,
            self._wake,
            inventory.describe,
            dict(os.environ),
        )
        self._remote = RemoteChoices(self._core, renderer)
        share(self._spec.app, self._core, asyncio.get_running_loop(), self._remote)
        self._discovery: asyncio.Task[None] | None = None
        if self._spec.cache.share != "off":
            from router.cache_discovery import CacheDiscovery

            discovery = CacheDiscovery(self._core.caches, self._spec.app, self._spec.secret, self._spec.cache)
            self._discovery = asyncio.create_task(discovery.run())
        self._core.expect_pools(pool.deployment_name for pool in pools)
        # The first handle call makes Serve tell this process which replicas there are, and keep telling.
        await self._wake()
        # Until this returns, Serve sends nobody here; a router that decides knows what the replicas hold.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._core.directory.settled.wait(), _FIRST_NEWS_S)

    def __serve_build_asgi_app__(self) -> RouterApp:
        return self._app

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Serve's `user_config`: limits, weights, tenants, thresholds. Raises on a value that can't be used."""
        self._core.configure(RouterConfig.model_validate(config))
        self._app.configure()

    async def _wake(self) -> None:
        """Call every pool once in the background: Serve starts a replica for a call that waits for one."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._call_pools())

    async def _call_pools(self) -> None:
        async def call(pool: DeploymentHandle) -> None:
            try:
                await asyncio.wait_for(pool.describe.remote(), self._core.config.limits.queue_timeout_s)
            except Exception as error:
                logger.info(
                    "no replica of %s answered: %s", pool.deployment_name, str(error) or type(error).__name__
                )

        await asyncio.gather(*(call(pool) for pool in self._pools))

    # Handle calls from other processes; see router.request_router.

    async def choose(
        self, path: str, body: dict[str, Any], exclude: list[str] | None = None
    ) -> tuple[str, str] | None:
        """Decide for a handle call. Returns (ticket, replica id), or None when no replica has room."""
        return await self._remote.choose(path, body, exclude or [])

    async def release(self, ticket: str) -> None:
        """A handle call has ended."""
        self._remote.release(ticket)


def endpoint_on(endpoint: str, node: str) -> str:
    """`node` in the place of a `*`: who listens at every address is reached at that of the node."""
    return endpoint.replace("*", f"[{node}]" if ":" in node else node)


def _renderer(spec: RouterSpec) -> Renderer:
    os.environ.update(spec.env)
    module, _, name = spec.renderer.partition(":")
    renderer: Renderer = getattr(importlib.import_module(module), name)(**spec.renderer_args)
    return renderer
