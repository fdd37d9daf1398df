"""The Serve application: `cluster.app:build` makes it from a configuration given as arguments.

    applications:
      - name: manta
        import_path: cluster.app:build
        args: { model: { path: ... }, ... }      # the fields of ClusterConfig

Arguments of a deployment carry only what must restart it; what may change live goes into the router's `user_config`.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from cluster.config import ClusterConfig
from cluster.models import resolve_model
from cluster.secret import cluster_secret
from router.deployment import Router, RouterSpec
from workers.config import PoolConfig
from workers.placement import place
from workers.replica import Replica, ReplicaSpec

_MANY = 1_000_000
"""Serve's own limits are out of the way: the router bounds what it takes in, per replica and in its queue."""


def build(args: dict[str, Any]) -> Application:
    """Serve's application builder. Raises ConfigError with one line per finding."""
    config = resolved(ClusterConfig.parse(args, "application arguments"))
    secret = cluster_secret()
    pools = [_pool(config, pool, secret) for pool in config.pools]
    spec = RouterSpec(
        app=config.name,
        secret=secret,
        models=(config.served_name, *config.model.adapters),
        engine=config.engine.kind,
        model_path=config.model.path,
        engine_args=config.engine.args,
        env=config.engine.env,
        max_model_len=config.engine.sim.max_model_len,
    )
    router = serve.deployment(Router).options(
        name="router",
        num_replicas=config.router.replicas,
        max_ongoing_requests=_MANY,
        ray_actor_options={"num_cpus": config.router.num_cpus},
        user_config=config.router.model_dump(mode="json"),
        health_check_period_s=5,
        graceful_shutdown_timeout_s=60,
    )
    return router.bind(spec.model_dump(mode="json"), *pools)


def resolved(config: ClusterConfig) -> ClusterConfig:
    """With the names of fetched models replaced by their folders."""
    if config.engine.kind == "sim":
        return config
    name = config.model.served_name
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(resolve_model(config.model.path)), "name": name})
        }
    )


def _pool(config: ClusterConfig, pool: PoolConfig, secret: str) -> Application:
    placement = place(config.engine, pool, _device(config))
    engine = config.engine.model_copy(update={"args": {**config.engine.args, **placement.engine_args}})
    spec = ReplicaSpec(model=config.model, engine=engine, pool=pool, cache=config.cache, secret=secret)
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
            metrics_interval_s=min(1.0, scaling.look_back_s),
            policy=AutoscalingPolicy(policy_function="workers.autoscaling:demand_policy"),
        )
    return serve.deployment(Replica).options(**options).bind(spec.model_dump(mode="json"))


def _device(config: ClusterConfig) -> str:
    import ray

    if config.engine.device != "auto":
        return config.engine.device
    return "cuda" if ray.cluster_resources().get("GPU") else "cpu"
