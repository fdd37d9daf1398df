"""NetworkPolicies: what they open exists, and what is needed is open where something is closed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.k8s.kustomize import Object
from cluster.k8s.workloads import HEAD, Finding, Workload, identity, items, mapping, workloads

_OF_HEAD = ("gcs-server", "dashboard", "serve")
_OF_ALL = (
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
)
_DNS = 53


def check_network(objects: list[Object]) -> Iterator[Finding]:
    """Findings among all objects."""
    pods = workloads(objects)
    yield from _policies(objects, pods)
    policies = [item for item in objects if item.get("kind") == "NetworkPolicy"]
    for pod in pods:
        for direction, port in _needed(pod, objects):
            if not _is_open(policies, pod, direction, port):
                yield Finding(pod.where, f"no NetworkPolicy opens {direction} at port {port}, which it needs")


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """A LabelSelector, with matchLabels and matchExpressions. An empty one matches all."""
    if not mapping(selector.get("matchLabels")).items() <= labels.items():
        return False
    for expression in items(selector.get("matchExpressions")):
        found, values = labels.get(str(expression.get("key"))), expression.get("values", [])
        operator = expression.get("operator")
        held = {
            "In": found in values,
            "NotIn": found not in values,
            "Exists": found is not None,
            "DoesNotExist": found is None,
        }.get(str(operator), False)
        if not held:
            return False
    return True


def declares(pod: Workload, port: Any) -> bool:
    """Whether a pod says that it listens there: by name or number, or as Ray does by its options."""
    declared = pod.ports()
    return (
        port in declared if isinstance(port, str) else port in {*declared.values(), *pod.ray_ports().values()}
    )


def _needed(pod: Workload, objects: list[Object]) -> Iterator[tuple[str, int]]:
    """Direction and port, for what a Ray pod can't work without and what Prometheus is told to ask."""
    if not pod.group:
        return
    declared = pod.ports() | pod.ray_ports()
    names = {*_OF_ALL, *(_OF_HEAD if pod.group == HEAD else ("serve",))}
    for item in objects:
        spec = mapping(item.get("spec"))
        if item.get("kind") == "PodMonitor" and matches(mapping(spec.get("selector")), pod.labels):
            names |= {str(endpoint.get("port")) for endpoint in items(spec.get("podMetricsEndpoints"))}
    yield from (("ingress", declared[name]) for name in sorted(names) if name in declared)
    ends = [str(pod.params.get(f"{end}-worker-port", "")) for end in ("min", "max")]
    yield from (("ingress", int(port)) for port in ends if port.isdigit())
    yield "egress", _DNS
    if pod.group != HEAD:
        yield "egress", 6379


def _is_open(policies: list[Object], pod: Workload, direction: str, port: int) -> bool:
    """Whether some rule, whoever it is for, lets the port through; true where no policy closes the direction."""
    closed = False
    for policy in policies:
        spec = mapping(policy.get("spec"))
        if direction.capitalize() not in spec.get("policyTypes", []):
            continue
        if not matches(mapping(spec.get("podSelector")), pod.labels):
            continue
        closed = True
        if any(_covers(rule, port, pod) for rule in items(spec.get(direction))):
            return True
    return not closed


def _covers(rule: dict[str, Any], port: int, pod: Workload) -> bool:
    entries = items(rule.get("ports"))
    for entry in entries:
        first = entry.get("port")
        if isinstance(first, str):
            first = pod.ports().get(first, 0)
        last = entry.get("endPort", first)
        if isinstance(first, int) and isinstance(last, int) and first <= port <= last:
            return True
    return not entries


def _policies(objects: list[Object], pods: list[Workload]) -> Iterator[Finding]:
    """Ports that a policy opens are declared by the pods that they are opened at."""
    for item in objects:
        if item.get("kind") != "NetworkPolicy":
            continue
        spec = mapping(item.get("spec"))
        own = [pod for pod in pods if matches(mapping(spec.get("podSelector")), pod.labels)]
        for rule in items(spec.get("ingress")):
            yield from _opened(identity(item), rule, own)
        for rule in items(spec.get("egress")):
            peers = [peer for peer in items(rule.get("to")) if peer.keys() == {"podSelector"}]
            if peers and len(peers) == len(items(rule.get("to"))):
                there = [
                    pod
                    for pod in pods
                    if any(matches(mapping(peer["podSelector"]), pod.labels) for peer in peers)
                ]
                yield from _opened(identity(item), rule, there)
        types = spec.get("policyTypes", [])
        for direction, kind in (("ingress", "Ingress"), ("egress", "Egress")):
            if direction in spec and kind not in types:
                yield Finding(identity(item), f"it has rules of {direction}, and policyTypes lack {kind}")


def _opened(where: str, rule: dict[str, Any], pods: list[Workload]) -> Iterator[Finding]:
    for entry in items(rule.get("ports")):
        port = entry.get("port")
        if "endPort" in entry:
            if not isinstance(port, int) or entry["endPort"] < port:
                yield Finding(where, f"endPort {entry['endPort']} is below port {port}")
        elif port is not None and pods and not any(declares(pod, port) for pod in pods):
            yield Finding(where, f"port {port!r} is opened, and no pod that it is for declares it")
