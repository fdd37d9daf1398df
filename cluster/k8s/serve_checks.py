"""What serveConfigV2 must have in common with the pods that its deployments run in."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

from cluster.config import ConfigError
from cluster.k8s.kustomize import Object
from cluster.k8s.ray_checks import ray_resources
from cluster.k8s.resource_checks import GPU, limit
from cluster.k8s.serve_config import ROUTER_DEPLOYMENT, Served, number, read_serve_config
from cluster.k8s.serve_pods import check_pod_serves
from cluster.k8s.workloads import (
    Finding,
    Workload,
    identity,
    mapping,
    ray_cluster,
    worker_groups,
    workloads,
)
from cluster.roles import ROUTER, role_resource
from workers.config import PoolConfig
from workers.placement import place


def check_serve(service: Object) -> Iterator[Finding]:
    """Findings about serveConfigV2 and about the pods that don't fit it."""
    where = identity(service)
    try:
        data, served = read_serve_config(mapping(service.get("spec")).get("serveConfigV2"))
    except ConfigError as error:
        yield Finding(where, str(error))
        return
    for message in (*_reachable(data, served), *_deployments(served), *_delays(service, served)):
        yield Finding(where, message)
    pods = {pod.group: pod for pod in workloads([service])}
    for message in _capacity(service, served, pods):
        yield Finding(where, message)
    for pod in pods.values():
        yield from check_pod_serves(pod, served)


def groups_of(service: Object, resource: str) -> list[dict[str, Any]]:
    """Worker groups whose nodes offer this resource of Ray's."""
    found = []
    for group in worker_groups(service):
        try:
            offered = ray_resources(group)
        except (ValueError, TypeError, AttributeError):
            continue
        if offered.get(resource, 0) > 0:
            found.append(group)
    return found


def _reachable(data: dict[str, Any], served: Served) -> Iterator[str]:
    options = mapping(data.get("http_options"))
    if options.get("host") != "0.0.0.0":
        yield f"serveConfigV2: http_options.host is {options.get('host')!r}; needed: 0.0.0.0, for Services to reach it"
    if data.get("proxy_location") != "EveryNode":
        yield (
            f"serveConfigV2: proxy_location is {data.get('proxy_location')!r}; needed: EveryNode, since a worker is "
            "ready when its own proxy answers"
        )
    http = served.config.http
    if (http.host, http.port) != (options.get("host"), options.get("port", 8000)):
        yield f"serveConfigV2: args.http says {http.host}:{http.port}, http_options something else"
    if not served.config.placement.use_roles:
        yield "serveConfigV2: placement.use_roles is false; needed: true, so that replicas keep to their groups"
    if served.config.engine.kind == "vllm" and served.config.engine.device == "auto":
        yield "serveConfigV2: engine.device is auto; needed: cpu or cuda"


def _deployments(served: Served) -> Iterator[str]:
    built = {ROUTER_DEPLOYMENT, *(pool.role for pool in served.config.pools)}
    for name in sorted(served.deployments.keys() - built):
        yield f"serveConfigV2: there is no deployment {name!r}; there are {', '.join(sorted(built))}"
    for name in sorted(built - served.deployments.keys()):
        yield f"serveConfigV2: deployment {name!r} is missing, so its number of replicas is the code's default"
    for name, deployment in served.deployments.items():
        scaling = mapping(deployment.get("autoscaling_config"))
        least, most = scaling.get("min_replicas", 1), scaling.get("max_replicas", 1)
        if scaling and not least <= scaling.get("initial_replicas", least) <= most:
            yield f"serveConfigV2: {name}: min_replicas {least} and max_replicas {most}; needed: in ascending order"


def _delays(service: Object, served: Served) -> Iterator[str]:
    try:
        longest = served.limits.answer_timeout_s
    except ConfigError as error:
        yield str(error)
        return
    for pool in served.config.pools:
        if pool.drain_timeout_s < longest:
            yield (
                f"serveConfigV2: {pool.role}: drain_timeout_s is {pool.drain_timeout_s:g}; needed: {longest:g} at "
                "least, router.limits.answer_timeout_s, the longest that a request may take"
            )
    router = number(served.deployments.get(ROUTER_DEPLOYMENT, {}).get("graceful_shutdown_timeout_s"), 60)
    if router < longest:
        yield (
            f"serveConfigV2: {ROUTER_DEPLOYMENT}: graceful_shutdown_timeout_s is {router:g}; needed: {longest:g} at "
            "least, since streams run through routers"
        )
    delay = mapping(service.get("spec")).get("rayClusterDeletionDelaySeconds", 60)
    if not isinstance(delay, int) or delay <= served.longest_s:
        yield (
            f"rayClusterDeletionDelaySeconds is {delay}; needed: more than {served.longest_s:g}, so that an upgrade "
            "lets the old cluster finish what is open"
        )


def _capacity(service: Object, served: Served, pods: dict[str, Workload]) -> Iterator[str]:
    """Every deployment finds nodes of its role, with room for as many replicas as it may have."""
    wanted = {ROUTER_DEPLOYMENT: (ROUTER, None)} | {
        pool.role: (role_resource(pool.role), pool) for pool in served.config.pools
    }
    for name, (resource, pool) in wanted.items():
        groups = groups_of(service, resource)
        if not groups:
            yield f"no worker group offers the Ray resource {resource}, which deployment {name} asks for"
            continue
        room = sum(_room(served, name, pool, group, pods[str(group.get("groupName"))]) for group in groups)
        deployment = served.deployments.get(name, {})
        most = mapping(deployment.get("autoscaling_config")).get(
            "max_replicas", deployment.get("num_replicas", 1)
        )
        if isinstance(most, int) and most > room:
            yield f"deployment {name} may have {most} replicas; its worker groups have room for {room} at most"
    if ray_cluster(service).get("enableInTreeAutoscaling") is not True:
        for name in served.deployments:
            if "autoscaling_config" in served.deployments[name]:
                yield f"deployment {name} scales, and its nodes do not: needed: enableInTreeAutoscaling: true"


def _room(served: Served, name: str, pool: PoolConfig | None, group: dict[str, Any], pod: Workload) -> int:
    """Replicas of a deployment that the group's nodes hold when there are as many of them as there may be."""
    hosts, most = group.get("numOfHosts", 1), group.get("maxReplicas", 0)
    if not isinstance(hosts, int) or not isinstance(most, int):
        return 0
    nodes = hosts * most
    config = served.config
    if pool is None:
        return nodes * (config.placement.max_routers_per_node or 1000)
    placement = place(config.engine, pool, "cuda" if config.engine.device == "cuda" else "cpu")
    gpus = int(limit(pod.main, GPU))
    if placement.placement_group_bundles is not None:
        needed = sum(bundle.get("GPU", 0) for bundle in placement.placement_group_bundles)
        return nodes // max(1, ceil(needed / gpus)) if gpus else 0
    per_node = config.placement.max_replicas_per_node or 1000
    if asked := int(placement.ray_actor_options.get("num_gpus", 0)):
        per_node = min(per_node, gpus // asked)
    elif cores := pool.resources.cores:
        per_node = (
            min(per_node, max(1, int(limit(pod.main, "cpu")) // cores))
            if limit(pod.main, "cpu")
            else per_node
        )
    return nodes * per_node
