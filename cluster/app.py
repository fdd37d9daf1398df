"""The Serve application: `cluster.app:build` makes it from a configuration given as arguments.

    applications:
      - name: manta
        import_path: cluster.app:build
        args: { model: { path: ... }, ... }      # the fields of ClusterConfig
        deployments:
          - name: router
            user_config: { limits: ..., policy: ..., tenants: ... }      # fields of RouterConfig that change live

Arguments of a deployment carry only what must restart it; what may change live goes into the router's `user_config`.
With `serve deploy` Serve restarts everything when `args` change, and nothing when a `user_config` below it does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ray
from pydantic import BaseModel
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from cluster.config import ClusterConfig
from cluster.models import resolve_model
from cluster.roles import ROUTER, SHARE, on_role_nodes, ray_nodes, wait_for_nodes
from cluster.secret import cluster_secret
from router.deployment import Router, RouterSpec
from router.shared_core import DEPLOYMENT
from workers.config import PoolConfig
from workers.placement import place
from workers.replica import Replica, ReplicaSpec

try:
    PACKAGE_VERSION = version("manta-serve")
except PackageNotFoundError:
    PACKAGE_VERSION = "unpackaged"

_MANY = 1_000_000
"""Serve's own limits are out of the way: the router bounds what it takes in, per replica and in its queue."""


def build(args: dict[str, Any]) -> Application:
    """Serve's application builder. Raises ConfigError with one line per finding."""
    config = resolved(ClusterConfig.parse(args, "application arguments"))
    if ray.is_initialized():
        wait_for_nodes(config, ray_nodes)
    secret = cluster_secret()
    pools = [_pool(config, pool, secret) for pool in config.pools]
    renderer, renderer_args = _renderer(config)
    spec = RouterSpec(
        app=config.name,
        endpoint=config.endpoint_at("*"),
        secret=secret,
        models=(config.served_name, *config.model.adapters),
        renderer=renderer,
        renderer_args=renderer_args,
        env=config.engine.env,
        cache=config.cache,
    )
    router = _deployment(
        Router,
        spec,
        [pool.role for pool in config.pools],
        name=DEPLOYMENT,
        num_replicas=config.router.replicas,
        max_ongoing_requests=_MANY,
        ray_actor_options=_router_options(config),
        max_replicas_per_node=config.placement.max_routers_per_node,
        user_config=config.router.model_dump(mode="json"),
        health_check_period_s=5,
        graceful_shutdown_timeout_s=60,
        # A line for every request costs more than deciding where it goes; /metrics and /admin/decisions tell more.
        logging_config={"enable_access_log": False},
    )
    return router.bind(spec.model_dump(mode="json"), *pools)


def _router_options(config: ClusterConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": config.router.num_cpus}
    return options | {"resources": {ROUTER: SHARE}} if config.placement.use_roles else options


def _deployment(
    target: type, spec: BaseModel, handles: Sequence[str] = (), **options: Any
) -> serve.Deployment:
    """A deployment that Serve restarts when its arguments or this package change, and not otherwise. `handles` names
    the deployments that it is given handles of.

    `serve.run` gives every deployment a new version each time, which restarts it, unless it has one of its own. With
    `serve deploy` Serve makes the version from the application's arguments, and this one is not looked at.
    """
    parts = [PACKAGE_VERSION, target.__qualname__, spec.model_dump(mode="json"), list(handles)]
    content = json.dumps(parts, sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    return serve.deployment(target).options(**options, version=digest, _internal=True)


def _renderer(config: ClusterConfig) -> tuple[str, dict[str, Any]]:
    """The class that renders as the configured engine does, and its arguments."""
    if config.engine.kind == "sim":
        return "cluster.render_sim:SimRenderer", {"max_model_len": config.engine.sim.max_model_len}
    args = {"model_path": config.model.path, "engine_args": config.engine.args}
    return "cluster.render_vllm:VllmRenderer", args


def resolved(config: ClusterConfig) -> ClusterConfig:
    """With the names of fetched models replaced by their folders."""
    if config.engine.kind == "sim":
        return config
    name = config.model.served_name
    return config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"path": str(resolve_model(config.model.path)), "name": name}
            )
        }
    )


def _pool(config: ClusterConfig, pool: PoolConfig, secret: str) -> Application:
    engine = config.engine_of(pool)
    placement = place(engine, pool, _device(config))
    if config.placement.use_roles:
        placement = on_role_nodes(placement, pool.role)
    engine = engine.model_copy(update={"args": {**engine.args, **placement.engine_args}})
    spec = ReplicaSpec(
        model=config.model,
        engine=engine,
        pool=_of_any_size(pool),
        cache=config.cache,
        secret=secret,
        transfer=config.transfers,
    )
    options: dict[str, Any] = {
        "name": pool.role,
        "max_ongoing_requests": _MANY,
        "ray_actor_options": placement.ray_actor_options,
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
        "graceful_shutdown_timeout_s": pool.drain_timeout_s + 30,
        "graceful_shutdown_wait_loop_s": 0.5,
        "request_router_config": RequestRouterConfig(
            request_router_class="router.request_router:MantaRequestRouter",
            request_router_kwargs={"app": config.name, "pool": pool.role},
        ),
    }
    if placement.placement_group_bundles is not None:
        options["placement_group_bundles"] = placement.placement_group_bundles
        options["placement_group_strategy"] = placement.placement_group_strategy
    else:
        options["max_replicas_per_node"] = config.placement.max_replicas_per_node
    scaling = pool.autoscaling
    if scaling is None:
        options["num_replicas"] = pool.replicas
    else:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            initial_replicas=max(scaling.min_replicas, min(pool.replicas, scaling.max_replicas)),
            target_ongoing_requests=scaling.target_requests,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            look_back_period_s=scaling.look_back_s,
            metrics_interval_s=min(1.0, scaling.look_back_s / 2),
            policy=AutoscalingPolicy(policy_function="workers.autoscaling:demand_policy"),
        )
    return _deployment(Replica, spec, **options).bind(spec.model_dump(mode="json"))


def _of_any_size(pool: PoolConfig) -> PoolConfig:
    """What a replica may know of its pool: how many replicas there are is for Serve, and restarts none of them."""
    unset = PoolConfig()
    return pool.model_copy(update={"replicas": unset.replicas, "autoscaling": unset.autoscaling})


def _device(config: ClusterConfig) -> str:
    if config.engine.device != "auto":
        return config.engine.device
    return "cuda" if ray.cluster_resources().get("GPU") else "cpu"
