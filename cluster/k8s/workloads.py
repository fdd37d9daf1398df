"""The pods that manifests ask for, whatever kind of object asks, and what is found wrong with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cluster.k8s.kustomize import Object

HEAD = "head"
RAY_PORTS = {
    "gcs-server": ("port", 6379),
    "dashboard": ("dashboard-port", 8265),
    "client": ("ray-client-server-port", 10001),
    "metrics": ("metrics-export-port", 8080),
    "dashboard-agent": ("dashboard-agent-listen-port", 52365),
}
"""KubeRay's name of a port -> the option of `ray start` that moves it, and where it is otherwise."""
SERVE_PORTS = {"RAY_SERVE_HAPROXY_METRICS_PORT": 9101, "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500}
"""Variable that moves a port of Serve's -> where it is otherwise."""
_TEMPLATED = ("DaemonSet", "Deployment", "Job", "ReplicaSet", "StatefulSet")


class Finding(NamedTuple):
    """Something in the manifests that would not work, or not as meant."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True)
class Workload:
    """A pod template. Every field of it may be missing or of a wrong type: schemas are for others to check."""

    where: str
    template: Object
    labels: dict[str, str] = field(default_factory=dict)
    """Of its pods: those of the template, and those that a controller adds."""
    group: str = ""
    """Of a RayService: `head`, or a worker group's name; empty for other objects."""
    params: dict[str, Any] = field(default_factory=dict)
    """`rayStartParams` of the group."""
    claims: tuple[str, ...] = ()
    """Volumes that a StatefulSet makes for each of its pods."""
    sidecars: list[dict[str, Any]] = field(default_factory=list)
    """Containers that a controller adds."""

    @property
    def spec(self) -> dict[str, Any]:
        return mapping(self.template.get("spec"))

    @property
    def containers(self) -> list[dict[str, Any]]:
        return items(self.spec.get("containers"))

    @property
    def all_containers(self) -> list[dict[str, Any]]:
        return [*items(self.spec.get("initContainers")), *self.containers, *self.sidecars]

    @property
    def volumes(self) -> list[dict[str, Any]]:
        return items(self.spec.get("volumes"))

    @property
    def main(self) -> dict[str, Any]:
        """The container that Ray runs in, which is the first by KubeRay's rule."""
        return self.containers[0] if self.containers else {}

    def ports(self) -> dict[str, int]:
        """Declared ports of all containers, by name; a nameless one by its number."""
        declared = [port for container in self.all_containers for port in items(container.get("ports"))]
        return {
            str(port.get("name", port.get("containerPort"))): port.get("containerPort", 0)
            for port in declared
        }

    def ray_ports(self) -> dict[str, int]:
        """What Ray listens at in a pod of a group, by names of KubeRay, options and variables."""
        if not self.group:
            return {}
        given = {name: str(self.params.get(option, usual)) for name, (option, usual) in RAY_PORTS.items()}
        moved = {name: str(value) for name, value in self.params.items() if name.endswith("-port")}
        variables = {item.get("name"): str(item.get("value")) for item in items(self.main.get("env"))}
        serve = {name: variables.get(name, str(usual)) for name, usual in SERVE_PORTS.items()}
        return {name: int(port) for name, port in (given | moved | serve).items() if port.isdigit()}

    def mount_of(self, path: str) -> dict[str, Any]:
        """The main container's mount with the longest path that is `path` or above it; empty where there is none."""
        above = [
            mount
            for mount in items(self.main.get("volumeMounts"))
            if path == mount.get("mountPath")
            or path.startswith(str(mount.get("mountPath")).rstrip("/") + "/")
        ]
        return max(above, key=lambda mount: len(str(mount.get("mountPath"))), default={})

    def volume(self, name: Any) -> dict[str, Any]:
        return next((volume for volume in self.volumes if volume.get("name") == name), {})


def workloads(objects: list[Object]) -> list[Workload]:
    """Every pod template among the objects."""
    return [workload for item in objects for workload in _workloads(item)]


def ray_services(objects: list[Object]) -> list[Object]:
    return [item for item in objects if item.get("kind") == "RayService"]


def ray_cluster(service: Object) -> dict[str, Any]:
    return mapping(mapping(service.get("spec")).get("rayClusterConfig"))


def worker_groups(service: Object) -> list[dict[str, Any]]:
    return items(ray_cluster(service).get("workerGroupSpecs"))


def identity(item: Object) -> str:
    return f"{item.get('kind')} {mapping(item.get('metadata')).get('name')}"


def _workloads(item: Object) -> Iterator[Workload]:
    where = identity(item)
    if item.get("kind") == "RayService":
        head = mapping(ray_cluster(item).get("headGroupSpec"))
        yield _ray(f"{where}, head", HEAD, head, _autoscaler(ray_cluster(item), head))
        for group in worker_groups(item):
            yield _ray(f"{where}, group {group.get('groupName')}", str(group.get("groupName")), group)
        return
    spec = mapping(item.get("spec"))
    if item.get("kind") == "CronJob":
        spec = mapping(mapping(spec.get("jobTemplate")).get("spec"))
    elif item.get("kind") not in _TEMPLATED:
        return
    template = mapping(spec.get("template"))
    claims = tuple(
        str(mapping(claim.get("metadata")).get("name")) for claim in items(spec.get("volumeClaimTemplates"))
    )
    yield Workload(where, template, _labels(template), claims=claims)


def _autoscaler(cluster: dict[str, Any], head: dict[str, Any]) -> list[dict[str, Any]]:
    """The container that KubeRay puts beside the head's."""
    if not cluster.get("enableInTreeAutoscaling"):
        return []
    ray = next(iter(items(mapping(mapping(head.get("template")).get("spec")).get("containers"))), {})
    fields = ("command", "args", "env", "envFrom", "image", "imagePullPolicy", "resources", "securityContext")
    given = mapping(cluster.get("autoscalerOptions"))
    made = {name: given[name] for name in (*fields, "volumeMounts") if name in given}
    return [{"name": "autoscaler", "image": ray.get("image"), **made}]


def _ray(
    where: str, name: str, group: dict[str, Any], sidecars: list[dict[str, Any]] | None = None
) -> Workload:
    template = mapping(group.get("template"))
    # KubeRay's own labels win over those of the template.
    labels = _labels(template) | {
        "ray.io/is-ray-node": "yes",
        "ray.io/node-type": HEAD if name == HEAD else "worker",
        "ray.io/group": "headgroup" if name == HEAD else name,
        "app.kubernetes.io/created-by": "kuberay-operator",
    }
    labels.setdefault("app.kubernetes.io/name", "kuberay")
    return Workload(where, template, labels, name, mapping(group.get("rayStartParams")), (), sidecars or [])


def _labels(template: Object) -> dict[str, str]:
    return dict(mapping(mapping(template.get("metadata")).get("labels")))


def mapping(data: Any) -> dict[str, Any]:
    """`data`, or an empty mapping where it is none."""
    return data if isinstance(data, dict) else {}


def items(data: Any) -> list[dict[str, Any]]:
    """The mappings in a list; nothing where it is none."""
    return [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []
