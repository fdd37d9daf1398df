"""What a RayService must say so that KubeRay and Ray do what is meant, where the CRD takes any text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from cluster.k8s.kustomize import Object
from cluster.k8s.pod_checks import PULL_POLICIES
from cluster.k8s.workloads import (
    HEAD,
    Finding,
    Workload,
    identity,
    mapping,
    ray_cluster,
    worker_groups,
    workloads,
)  # fmt: skip

UPGRADES = ("NewCluster", "NewClusterWithIncrementalUpgrade", "None")
INCREMENTAL = "NewClusterWithIncrementalUpgrade"
START_FLAGS = frozenset({"block", "disable-usage-stats", "no-monitor", "enable-resource-isolation"})
START_TEXTS = frozenset({
    "address", "dashboard-host", "labels", "log-color", "log-style", "node-ip-address", "node-name",
    "object-spilling-directory", "plasma-directory", "redis-password", "redis-username", "resources", "temp-dir",
    "include-dashboard", "tracing-startup-hook",
})  # fmt: skip
START_NUMBERS = frozenset({
    "dashboard-agent-grpc-port", "dashboard-agent-listen-port", "dashboard-port", "max-worker-port", "memory",
    "metrics-export-port", "min-worker-port", "node-manager-port", "num-cpus", "num-gpus", "object-manager-port",
    "object-store-memory", "port", "ray-client-server-port", "runtime-env-agent-port",
})  # fmt: skip
"""Options of `ray start` that may stand in rayStartParams."""
_OF_RAY = {"CPU": "num-cpus", "GPU": "num-gpus", "memory": "memory"}
_ANNOTATION = "ray.io/ft-enabled"


def check_service(service: Object) -> Iterator[Finding]:
    """Findings of one RayService, but for what is inside serveConfigV2 and its pods."""
    where = identity(service)
    for message in (
        *_upgrade(service),
        *_autoscaler(service),
        *_fault_tolerance(service),
        *_authentication(service),
    ):
        yield Finding(where, message)
    for message in _groups(service):
        yield Finding(where, message)
    for pod in workloads([service]):
        for message in (*_start_params(pod), *_scheduling(service, pod)):
            yield Finding(pod.where, message)


def ray_resources(group: Mapping[str, Any]) -> dict[str, float]:
    """Ray's resources of a node of the group, by the `resources` field or by rayStartParams. Raises ValueError."""
    if "resources" in group:
        return {name: float(value) for name, value in mapping(group["resources"]).items()}
    params = mapping(group.get("rayStartParams"))
    found = params.get("resources", "{}")
    # Quoted once more, since KubeRay puts it into a shell's command line.
    inner = json.loads(found)
    if isinstance(inner, str):
        inner = json.loads(inner)
    elif params.get("resources"):
        raise ValueError("needed: quotes around it, for the shell that starts Ray")
    given = {resource: float(params[name]) for resource, name in _OF_RAY.items() if name in params}
    return given | {name: float(value) for name, value in inner.items()}


def _upgrade(service: Object) -> Iterator[str]:
    spec = mapping(service.get("spec"))
    upgrade = mapping(spec.get("upgradeStrategy"))
    kind = upgrade.get("type")
    if kind not in UPGRADES:
        yield f"upgradeStrategy.type is {kind!r}; needed: one of {', '.join(UPGRADES)}"
    options = upgrade.get("clusterUpgradeOptions")
    if kind == INCREMENTAL:
        if not ray_cluster(service).get("enableInTreeAutoscaling"):
            yield f"upgradeStrategy {INCREMENTAL} needs enableInTreeAutoscaling: true"
        if not mapping(options).get("gatewayClassName"):
            yield f"upgradeStrategy {INCREMENTAL} needs clusterUpgradeOptions with a gatewayClassName"
        step, surge = (mapping(options).get(name) for name in ("stepSizePercent", "maxSurgePercent"))
        if not isinstance(step, int) or not 0 < step <= 100:
            yield f"clusterUpgradeOptions.stepSizePercent is {step!r}; needed: 1 to 100"
        if surge is not None and (not isinstance(surge, int) or not 0 < surge <= 100):
            yield f"clusterUpgradeOptions.maxSurgePercent is {surge!r}; needed: 1 to 100"
    elif options is not None:
        yield f"clusterUpgradeOptions has no effect with upgradeStrategy {kind}"


def _autoscaler(service: Object) -> Iterator[str]:
    cluster = ray_cluster(service)
    options = mapping(cluster.get("autoscalerOptions"))
    if options and not cluster.get("enableInTreeAutoscaling"):
        yield "autoscalerOptions have no effect without enableInTreeAutoscaling: true"
    policy = options.get("imagePullPolicy")
    if policy is not None and policy not in PULL_POLICIES:
        yield f"autoscalerOptions.imagePullPolicy is {policy!r}; needed: {', '.join(PULL_POLICIES)}"
    if cluster.get("enableInTreeAutoscaling") and options.get("version") != "v2":
        yield f"autoscalerOptions.version is {options.get('version')!r}; needed: v2, which drains nodes first"


def _fault_tolerance(service: Object) -> Iterator[str]:
    options = ray_cluster(service).get("gcsFaultToleranceOptions")
    metadata = mapping(service.get("metadata"))
    annotated = _ANNOTATION in mapping(metadata.get("annotations"))
    if options is None:
        if annotated:
            yield f"annotation {_ANNOTATION} needs gcsFaultToleranceOptions in its place"
        return
    options = mapping(options)
    if annotated:
        yield f"annotation {_ANNOTATION} beside gcsFaultToleranceOptions; needed: the options alone"
    if options.get("backend", "redis") != "redis":
        return
    if not options.get("redisAddress"):
        yield "gcsFaultToleranceOptions has no redisAddress"
    password = mapping(options.get("redisPassword"))
    if "value" in password:
        yield "gcsFaultToleranceOptions.redisPassword stands in the manifest; needed: valueFrom.secretKeyRef"
    if not mapping(password.get("valueFrom")).get("secretKeyRef"):
        yield "gcsFaultToleranceOptions.redisPassword is not taken from a Secret"
    if not options.get("externalStorageNamespace"):
        return
    # KubeRay makes a name of the cluster's own where none is given; one for all would mix old and new in an upgrade.
    if mapping(mapping(service.get("spec")).get("upgradeStrategy")).get("type") != "None":
        yield (
            "gcsFaultToleranceOptions.externalStorageNamespace is fixed: the cluster that an upgrade adds would read "
            "the state of the old one; leave it out"
        )


def _authentication(service: Object) -> Iterator[str]:
    mode = mapping(ray_cluster(service).get("authOptions")).get("mode")
    if mode != "token":
        yield f"authOptions.mode is {mode!r}; needed: token, since who reaches Ray's ports runs code in the cluster"


def _groups(service: Object) -> Iterator[str]:
    groups = worker_groups(service)
    for name, times in Counter(group.get("groupName") for group in groups).items():
        if times > 1:
            yield f"worker group {name!r} is there {times} times"
        if name == HEAD:
            yield f"a worker group is called {HEAD!r}"
    for group in groups:
        least, most = group.get("minReplicas", 0), group.get("maxReplicas", 0)
        wanted = group.get("replicas", least)
        if not all(isinstance(number, int) for number in (least, wanted, most)):
            continue
        if not 0 <= least <= wanted <= most:
            yield (
                f"group {group.get('groupName')}: minReplicas {least}, replicas {wanted}, maxReplicas {most}; "
                "needed: in ascending order"
            )
        if not isinstance(hosts := group.get("numOfHosts", 1), int) or hosts < 1:
            yield f"group {group.get('groupName')}: numOfHosts is {hosts}; needed: 1 or more"


def _start_params(pod: Workload) -> Iterator[str]:
    for name, value in pod.params.items():
        if name not in START_FLAGS | START_TEXTS | START_NUMBERS:
            yield f"rayStartParams.{name}: `ray start` has no such option"
        elif not isinstance(value, str):
            yield f"rayStartParams.{name} is {value!r}; needed: text"
        elif name in START_FLAGS and value not in ("true", "false"):
            yield f"rayStartParams.{name} is {value!r}; needed: 'true' or 'false'"
        elif name in START_NUMBERS and not value.isdigit():
            yield f"rayStartParams.{name} is {value!r}; needed: a whole number"


def _scheduling(service: Object, pod: Workload) -> Iterator[str]:
    cluster = ray_cluster(service)
    if pod.group == HEAD:
        group: dict[str, Any] = mapping(cluster.get("headGroupSpec"))
    else:
        group = next(item for item in worker_groups(service) if str(item.get("groupName")) == pod.group)
    both = (
        [name for name in (*_OF_RAY.values(), "resources") if name in pod.params]
        if "resources" in group
        else []
    )
    if both:
        yield f"both `resources` and rayStartParams.{both[0]} say what the node offers; needed: one of them"
    try:
        offered = ray_resources(group)
    except (ValueError, TypeError, AttributeError) as error:
        yield f"its Ray resources can't be read: {error}"
        return
    if pod.group == HEAD and (offered.get("CPU") != 0 or offered.get("GPU", 0) != 0):
        yield f"it offers {offered.get('CPU', 'all')} CPUs; needed: num-cpus '0', so that no replica runs on the head"
    autoscaler = mapping(cluster.get("autoscalerOptions")).get("version", "")
    if autoscaler == "v2" and pod.spec.get("restartPolicy", "Never") != "Never":
        yield f"restartPolicy is {pod.spec['restartPolicy']!r}; autoscaler v2 needs Never or none"
