"""What a pod template must hold together by itself: volumes, images, ports, probes, environment, security."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from cluster.k8s.kustomize import split_image
from cluster.k8s.workloads import HEAD, Finding, Workload, items, mapping

PULL_POLICIES = ("Always", "IfNotPresent", "Never")
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "imagePullPolicy": PULL_POLICIES,
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "protocol": ("TCP", "UDP", "SCTP"),
    "medium": ("", "Memory", "HugePages"),
    "operator": ("Exists", "Equal", "In", "NotIn", "DoesNotExist", "Gt", "Lt"),
    "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    "whenUnsatisfiable": ("DoNotSchedule", "ScheduleAnyway"),
    "fsGroupChangePolicy": ("OnRootMismatch", "Always"),
}
"""Fields that are plain strings to a schema."""
_PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9](?:[a-z0-9]|-(?!-)){0,13}[a-z0-9]|[a-z]")
_PORT_IN_TEXT = re.compile(r"(?:localhost|127\.0\.0\.1):(\d+)")


def check_pod(pod: Workload) -> Iterator[Finding]:
    """Findings of one template."""
    for message in (
        *_volumes(pod), *_containers(pod), *_ports(pod), *_handlers(pod), *_values(pod.template), *_security(pod)
    ):  # fmt: skip
        yield Finding(pod.where, message)


def _volumes(pod: Workload) -> Iterator[str]:
    defined = [*(volume.get("name") for volume in pod.volumes), *pod.claims]
    yield from _repeated("volume", defined)
    mounted = set()
    for container in pod.all_containers:
        mounts = items(container.get("volumeMounts"))
        yield from _repeated(
            f"{container.get('name')}: mountPath", [mount.get("mountPath") for mount in mounts]
        )
        for mount in mounts:
            mounted.add(mount.get("name"))
            if mount.get("name") not in defined:
                yield (
                    f"{container.get('name')} mounts volume {mount.get('name')!r}, which is not defined; "
                    f"there are {', '.join(map(str, defined)) or 'none'}"
                )
            if not str(mount.get("mountPath", "")).startswith("/"):
                yield f"{container.get('name')}: mountPath is {mount.get('mountPath')!r}; needed: an absolute path"
    for volume in pod.volumes:
        if volume.get("name") not in mounted:
            yield f"volume {volume.get('name')!r} is mounted nowhere"
        if len(volume.keys() - {"name"}) != 1:
            yield f"volume {volume.get('name')!r} has {len(volume.keys() - {'name'})} sources; needed: one"
        if "emptyDir" in volume and "sizeLimit" not in mapping(volume["emptyDir"]):
            yield f"volume {volume.get('name')!r} has no sizeLimit: it could fill the node"


def _containers(pod: Workload) -> Iterator[str]:
    if not pod.containers:
        yield "there is no container"
    yield from _repeated("container", [container.get("name") for container in pod.all_containers])
    for container in pod.all_containers:
        name = container.get("name")
        image = container.get("image")
        if not image:
            yield f"{name} has no image"
        elif not _is_pinned(str(image)):
            yield f"{name}: image {image} is not pinned; needed: a tag with a version in it, or a digest"
        variables = items(container.get("env"))
        yield from _repeated(f"{name}: variable", [variable.get("name") for variable in variables])
        for variable in variables:
            if ("value" in variable) == ("valueFrom" in variable):
                yield f"{name}: variable {variable.get('name')} needs one of value and valueFrom"


def _is_pinned(image: str) -> bool:
    tag = split_image(image)[1]
    return tag.startswith("@sha256:") or any(letter.isdigit() for letter in tag)


def _ports(pod: Workload) -> Iterator[str]:
    ports = [port for container in pod.all_containers for port in items(container.get("ports"))]
    yield from _repeated("port name", [port["name"] for port in ports if "name" in port])
    yield from _repeated("port", [(port.get("containerPort"), port.get("protocol", "TCP")) for port in ports])
    for port in ports:
        number = port.get("containerPort")
        if not isinstance(number, int) or not 0 < number < 65536:
            yield f"containerPort is {number!r}; needed: 1 to 65535"
        name = port.get("name")
        if name is not None and not _PORT_NAME.fullmatch(str(name)):
            yield f"port name {name!r}; needed: at most 15 of a-z, 0-9 and -, with a letter among them"
        known = pod.ray_ports().get(str(name))
        if known is not None and number != known:
            yield f"port {name} is {number}; Ray listens at {known}"


def _handlers(pod: Workload) -> Iterator[str]:
    """Probes and hooks: each asks in one way, at a port that its container has."""
    for container in pod.all_containers:
        own = {port.get("name"): port.get("containerPort") for port in items(container.get("ports"))}
        if container is pod.main:
            own = pod.ray_ports() | own
        for kind, handler in _asking(container):
            ways = [way for way in ("exec", "httpGet", "tcpSocket", "grpc", "sleep") if way in handler]
            if len(ways) != 1:
                yield f"{container.get('name')}: {kind} asks in {len(ways)} ways; needed: one"
                continue
            way = mapping(handler[ways[0]])
            asked = [way["port"]] if "port" in way else []
            if ways[0] in ("httpGet", "tcpSocket") and not asked:
                yield f"{container.get('name')}: {kind} names no port"
            asked += [
                int(port) for text in way.get("command") or [] for port in _PORT_IN_TEXT.findall(str(text))
            ]
            for port in asked:
                if port not in own and port not in own.values():
                    there = ", ".join(f"{name} ({number})" for name, number in own.items()) or "none"
                    yield f"{container.get('name')}: {kind} asks port {port!r}, which is not declared; known: {there}"


def _asking(container: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in PROBES:
        if kind in container:
            yield kind, mapping(container[kind])
    for kind, handler in mapping(container.get("lifecycle")).items():
        yield kind, mapping(handler)


def _values(data: Any) -> Iterator[str]:
    """Fields whose values Kubernetes limits and its schema does not, at any depth."""
    if isinstance(data, list):
        for item in data:
            yield from _values(item)
    elif isinstance(data, dict):
        for key, value in data.items():
            allowed = _ALLOWED.get(key)
            if allowed is not None and isinstance(value, str) and value not in allowed:
                yield f"{key} is {value!r}; needed: {', '.join(name for name in allowed if name)}"
            yield from _values(value)


def _security(pod: Workload) -> Iterator[str]:
    whole = mapping(pod.spec.get("securityContext"))
    for container in pod.all_containers:
        name = container.get("name")
        context = mapping(container.get("securityContext"))
        if context.get("runAsNonRoot", whole.get("runAsNonRoot")) is not True:
            yield f"{name} may run as root; needed: runAsNonRoot: true"
        if 0 in (context.get("runAsUser"), whole.get("runAsUser")):
            yield f"{name} runs as user 0; needed: another"
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"{name} may gain privileges; needed: allowPrivilegeEscalation: false"
        if context.get("privileged"):
            yield f"{name} is privileged"
        if mapping(context.get("capabilities")).get("drop") != ["ALL"]:
            yield f"{name} keeps capabilities; needed: drop: [ALL]"
        profile = mapping(context.get("seccompProfile", whole.get("seccompProfile"))).get("type")
        if profile not in ("RuntimeDefault", "Localhost"):
            yield f"{name} has no seccomp profile; needed: RuntimeDefault"
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.spec.get(field):
            yield f"{field} is set"
    # The head's autoscaler asks the API server; nothing else does.
    if pod.group != HEAD and pod.spec.get("automountServiceAccountToken") is not False:
        yield "its pods get a service-account token; needed: automountServiceAccountToken: false"


def _repeated(what: str, names: list[Any]) -> Iterator[str]:
    for name, times in Counter(names).items():
        if times > 1:
            yield f"{what} {name!r} is there {times} times"
