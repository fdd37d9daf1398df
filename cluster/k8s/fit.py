"""A set of manifests changed to what a configuration needs: pods per role, their sizes, keys, the model, waiting times.

One pod holds one replica; Kubernetes packs pods onto nodes. What the manifests say beyond that stays as it is.
"""

from __future__ import annotations

import copy
from math import ceil
from typing import Any

from cluster.config import ClusterConfig
from cluster.export import ExportError, serve_config
from cluster.host_groups import ROUTER_ROLE, gpus_of
from cluster.k8s.fit_pods import fit_disk, fit_keys, fit_model, fit_sizes
from cluster.k8s.kustomize import Object
from cluster.k8s.serve_config import ROUTER_DEPLOYMENT, SHUTDOWN_S, read_serve_config
from cluster.k8s.workloads import ray_cluster, ray_services, worker_groups, workloads
from cluster.roles import role_resource
from cluster.yaml_text import Note, render

COMPONENT = "app.kubernetes.io/component"
"""Label whose value is a pod's role."""
OFFERED = "1000"
"""Of a role's Ray resource, by each node of the role; a replica asks for a thousandth."""
STOPPING_S = 60
"""From the end of a preStop hook to SIGKILL."""
_ARGS = """\
Fields of the configuration, except for what `deployments` says. A change below `args` restarts all deployments in
place, a part at a time."""
_LIVE = "Live: counts, the numbers of `autoscaling_config`, the router's `user_config`."


def fitted(objects: list[Object], config: ClusterConfig) -> list[Object]:
    """Changed copies. Raises ExportError for what these manifests can't be made to do."""
    objects = copy.deepcopy(objects)
    services = ray_services(objects)
    if len(services) != 1:
        raise ExportError(f"the base has {len(services)} RayServices; needed: one")
    service = services[0]
    before = read_serve_config(service["spec"]["serveConfigV2"])[1]
    objects = _role_objects(objects, config)
    _groups(service, config)
    _autoscaling(service, config)
    _serve(service, config)
    _delays(service, config)
    pods = {pod.group: pod for pod in workloads([service])}
    for pool in config.pools:
        fit_sizes(pods[pool.role], config, pool)
        fit_disk(pods[pool.role], before.config, config)
    fit_keys(pods[ROUTER_ROLE], before, config)
    return fit_model(objects, config)


def served(config: ClusterConfig) -> dict[str, Any]:
    """What serveConfigV2 says for the configuration, in plain types."""
    # The application is built before there are workers, and KubeRay does not try again when that fails.
    placement = config.placement.model_copy(update={"nodes_timeout_s": None})
    data = serve_config(config.model_copy(update={"placement": placement}))
    for deployment in data["applications"][0]["deployments"]:
        if deployment["name"] == ROUTER_DEPLOYMENT:
            deployment["graceful_shutdown_timeout_s"] = _longest(config)
    return data


def _longest(config: ClusterConfig) -> float:
    return max(pool.drain_timeout_s for pool in config.pools) + SHUTDOWN_S


def _serve(service: Object, config: ClusterConfig) -> None:
    data = served(config)
    application = data["applications"][0]
    arguments, deployments = application.pop("args"), application.pop("deployments")
    application |= {Note(_ARGS): None, "args": arguments, Note(_LIVE): None, "deployments": deployments}
    service["spec"]["serveConfigV2"] = render(data)


def _delays(service: Object, config: ClusterConfig) -> None:
    waits = ceil(_longest(config)) + SHUTDOWN_S
    service["spec"]["rayClusterDeletionDelaySeconds"] = waits
    for pod in workloads([service]):
        hook = pod.main.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
        if pod.group in (ROUTER_ROLE, *(pool.role for pool in config.pools)) and hook:
            hook[-1] = str(waits)
            pod.spec["terminationGracePeriodSeconds"] = waits + STOPPING_S


def _counts(config: ClusterConfig, role: str) -> tuple[int, int, int]:
    """Pods of a role: at least, at first, at most."""
    if role == ROUTER_ROLE:
        return (config.router.replicas,) * 3
    pool = next(pool for pool in config.pools if pool.role == role)
    if pool.autoscaling is None:
        return (pool.replicas,) * 3
    least, most = pool.autoscaling.min_replicas, pool.autoscaling.max_replicas
    return least, max(least, min(pool.replicas, most)), most


def _role_objects(objects: list[Object], config: ClusterConfig) -> list[Object]:
    """Without disruption budgets of roles that are not there, or that one pod has: it could only block."""
    kept = []
    for item in objects:
        if item["kind"] == "PodDisruptionBudget":
            role = item["spec"]["selector"].get("matchLabels", {}).get(COMPONENT)
            if role in ("unified", "decode", "prefill", ROUTER_ROLE):
                known = {ROUTER_ROLE, *(pool.role for pool in config.pools)}
                least = _counts(config, role)[0] if role in known else 0
                if least < 2:
                    continue
                item["spec"]["minAvailable"] = min(item["spec"]["minAvailable"], least - 1)
        kept.append(item)
    return kept


def _groups(service: Object, config: ClusterConfig) -> None:
    there = {group["groupName"]: group for group in worker_groups(service)}
    engines = [group for name, group in there.items() if name != ROUTER_ROLE]
    if ROUTER_ROLE not in there or not engines:
        raise ExportError("the base has no worker groups for routers and engines to be made after")
    made = [there[ROUTER_ROLE]]
    # Groups that stay keep their order: a patch follows them by name.
    roles = [pool.role for pool in config.pools]
    ordered = [name for name in there if name in roles] + [role for role in roles if role not in there]
    made += [there.get(role) or _copied(engines[0], role) for role in ordered]
    for group in made:
        group["minReplicas"], group["replicas"], group["maxReplicas"] = _counts(config, group["groupName"])
    for group, pool in (
        (group, pool) for group in made for pool in config.pools if group["groupName"] == pool.role
    ):
        if (hosts := ceil(gpus_of(config, pool) / pool.resources.gpus_per_node)) > 1:
            group["numOfHosts"] = hosts
        else:
            group.pop("numOfHosts", None)
    ray_cluster(service)["workerGroupSpecs"] = made


def _copied(group: Object, role: str) -> Object:
    made = copy.deepcopy(group)
    made["groupName"] = role
    made["resources"] = {role_resource(role): OFFERED}
    _relabel(made, group["groupName"], role)
    return made


def _relabel(data: Any, old: str, new: str) -> None:
    if isinstance(data, dict):
        if data.get(COMPONENT) == old:
            data[COMPONENT] = new
        for value in data.values():
            _relabel(value, old, new)
    elif isinstance(data, list):
        for value in data:
            _relabel(value, old, new)


def _autoscaling(service: Object, config: ClusterConfig) -> None:
    scales = any(pool.autoscaling is not None for pool in config.pools)
    if scales and not ray_cluster(service).get("enableInTreeAutoscaling"):
        raise ExportError("a pool scales; needed: a base with enableInTreeAutoscaling: true")
