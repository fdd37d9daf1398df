"""What objects say of each other: selectors match pods, ports and Services exist, Secrets are made by somebody."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from cluster.k8s.kustomize import CLUSTER_SCOPED, Object
from cluster.k8s.network_checks import declares, matches
from cluster.k8s.workloads import Finding, Workload, identity, items, mapping, ray_services, workloads

_EVERYWHERE = "ConfigMap/kube-root-ca.crt"
"""Kubernetes puts it into every namespace."""
_MADE = ("head-svc", "serve-svc")
"""Services that KubeRay makes for a RayService, after its name."""


class Selector(NamedTuple):
    where: str
    what: str
    selector: dict[str, Any]


def check_references(objects: list[Object], secrets: Collection[str] | None = None) -> Iterator[Finding]:
    """Findings among all objects. `secrets` that the operator makes; where not given, any is taken to be there."""
    pods = workloads(objects)
    for where, what, selector in _selectors(objects):
        if selector and not any(matches(selector, pod.labels) for pod in pods):
            yield Finding(where, f"{what} {selector} matches no pod")
    yield from _monitors(objects, pods)
    yield from _budgets(objects)
    yield from _services(objects, pods)
    yield from _spread(pods)
    yield from _named(objects, pods, secrets)
    yield from _namespaces(objects)


def _selectors(objects: list[Object]) -> Iterator[Selector]:
    for item in objects:
        where, spec = identity(item), mapping(item.get("spec"))
        if item.get("kind") in ("PodDisruptionBudget", "PodMonitor"):
            yield Selector(where, "selector", mapping(spec.get("selector")))
        elif item.get("kind") == "NetworkPolicy":
            yield Selector(where, "podSelector", mapping(spec.get("podSelector")))
            for peer in _peers(spec):
                # With a namespaceSelector the pods are somebody else's.
                if "namespaceSelector" not in peer and "podSelector" in peer:
                    yield Selector(where, "podSelector of a peer", mapping(peer["podSelector"]))
        elif item.get("kind") == "Service" and spec.get("selector"):
            yield Selector(where, "selector", {"matchLabels": mapping(spec["selector"])})


def _peers(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for direction, side in (("ingress", "from"), ("egress", "to")):
        for rule in items(spec.get(direction)):
            yield from items(rule.get(side))


def _monitors(objects: list[Object], pods: list[Workload]) -> Iterator[Finding]:
    for item in objects:
        if item.get("kind") != "PodMonitor":
            continue
        spec = mapping(item.get("spec"))
        chosen = [pod for pod in pods if matches(mapping(spec.get("selector")), pod.labels)]
        endpoints = items(spec.get("podMetricsEndpoints"))
        if not endpoints:
            yield Finding(identity(item), "it has no podMetricsEndpoints")
        for endpoint in endpoints:
            port = endpoint.get("port")
            if chosen and not any(declares(pod, port) for pod in chosen):
                yield Finding(identity(item), f"port {port!r} is declared by none of its pods")


def _budgets(objects: list[Object]) -> Iterator[Finding]:
    """A RayCluster has no scale subresource: of such pods Kubernetes can count no part."""
    for item in objects:
        if item.get("kind") != "PodDisruptionBudget":
            continue
        spec = mapping(item.get("spec"))
        if "maxUnavailable" in spec or not isinstance(spec.get("minAvailable"), int):
            found = spec.get("maxUnavailable", spec.get("minAvailable"))
            yield Finding(
                identity(item), f"it says {found!r}; needed: minAvailable, a number, or drains of nodes hang"
            )


def _services(objects: list[Object], pods: list[Workload]) -> Iterator[Finding]:
    """Ports of Services at their pods, and Services that routes name."""
    known = {_name(item) for item in objects if item.get("kind") == "Service"}
    known |= {f"{_name(service)}-{made}" for service in ray_services(objects) for made in _MADE}
    for item in objects:
        spec = mapping(item.get("spec"))
        if item.get("kind") == "Service":
            chosen = [
                pod for pod in pods if matches({"matchLabels": mapping(spec.get("selector"))}, pod.labels)
            ]
            for port in items(spec.get("ports")):
                target = port.get("targetPort", port.get("port"))
                if chosen and not any(declares(pod, target) for pod in chosen):
                    yield Finding(identity(item), f"targetPort {target!r} is declared by none of its pods")
        for name in _backends(item):
            if name not in known:
                yield Finding(
                    identity(item), f"there is no Service {name}; there are {', '.join(sorted(known))}"
                )


def _name(item: Object) -> str:
    return str(mapping(item.get("metadata")).get("name"))


def _backends(item: Object) -> Iterator[str]:
    spec = mapping(item.get("spec"))
    if item.get("kind") == "Ingress":
        for rule in items(spec.get("rules")):
            for path in items(mapping(rule.get("http")).get("paths")):
                yield str(mapping(mapping(path.get("backend")).get("service")).get("name"))
    elif item.get("kind") == "HTTPRoute":
        for rule in items(spec.get("rules")):
            for backend in items(rule.get("backendRefs")):
                if backend.get("kind", "Service") == "Service":
                    yield str(backend.get("name"))


def _spread(pods: list[Workload]) -> Iterator[Finding]:
    """Constraints that count the pod's own kind."""
    for pod in pods:
        for constraint in items(pod.spec.get("topologySpreadConstraints")):
            selector = mapping(constraint.get("labelSelector"))
            if not selector or not matches(selector, pod.labels):
                yield Finding(pod.where, f"topologySpreadConstraints: {selector} does not match its own pods")


def _named(objects: list[Object], pods: list[Workload], secrets: Collection[str] | None) -> Iterator[Finding]:
    """Secrets, ConfigMaps, claims and accounts are made here or said to be made by the operator."""
    there = {f"{item.get('kind')}/{mapping(item.get('metadata')).get('name')}" for item in objects} | {
        _EVERYWHERE
    }
    there |= {f"Secret/{name}" for name in secrets or ()}
    speaking = [(pod.where, pod.template) for pod in pods]
    speaking += [(identity(service), service) for service in ray_services(objects)]
    for where, data in speaking:
        for name in sorted(set(_references(data)) - there):
            if secrets is not None or not name.startswith("Secret/"):
                known = ", ".join(sorted(one for one in there if one.startswith(name.partition("/")[0])))
                yield Finding(where, f"there is no {name}; known: {known or 'none'}")


_FIELDS = {
    "secretKeyRef": ("Secret", "name"),
    "secretRef": ("Secret", "name"),
    "secret": ("Secret", "secretName"),
    "authOptions": ("Secret", "secretName"),
    "configMapKeyRef": ("ConfigMap", "name"),
    "configMapRef": ("ConfigMap", "name"),
    "configMap": ("ConfigMap", "name"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
}


def _references(data: Any) -> Iterator[str]:
    if isinstance(data, list):
        for item in data:
            yield from _references(item)
    elif isinstance(data, dict):
        for key, value in data.items():
            if key == "serviceAccountName" and value != "default":
                yield f"ServiceAccount/{value}"
            elif key == "imagePullSecrets":
                yield from (f"Secret/{secret.get('name')}" for secret in items(value))
            kind, field = _FIELDS.get(key, ("", ""))
            if kind and isinstance(value, dict) and value.get(field) and not value.get("optional"):
                yield f"{kind}/{value[field]}"
            yield from _references(value)


def _namespaces(objects: list[Object]) -> Iterator[Finding]:
    spaces = {
        mapping(item.get("metadata")).get("namespace")
        for item in objects
        if item.get("kind") not in CLUSTER_SCOPED
    }
    if len(spaces) > 1:
        found = ", ".join(sorted(str(space) for space in spaces))
        yield Finding("manifests", f"objects are in several namespaces: {found}")
