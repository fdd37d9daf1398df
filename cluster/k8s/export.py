"""`manta export k8s`: a configuration as a kustomize overlay over the manifests that ship.

The overlay says only what differs, in patches that name what they were made for: one that no longer fits is refused by
kustomize instead of changing something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.config import ClusterConfig
from cluster.export import ExportError, require_device
from cluster.host_groups import lock_of
from cluster.k8s import json_patch
from cluster.k8s.checks import Versions, check
from cluster.k8s.fit import fitted
from cluster.k8s.kustomize import Object, in_namespace, name_of, split_image, with_image
from cluster.k8s.workloads import ray_services, workloads
from cluster.yaml_text import Note, render

FILE = "kustomization.yaml"
MARK = "written by `manta export k8s`"
SERVE_PORT = 8000
"""Probes, Services and policies of the manifests know the port by this number."""


@dataclass(frozen=True)
class Overlay:
    """A folder in the making."""

    files: dict[str, str]
    """File name -> text."""
    objects: list[Object]
    """What kustomize makes of it."""


@dataclass(frozen=True)
class Naming:
    """What the configuration does not say."""

    image: str = ""
    """Name of the image without a tag, as in `registry.example.com/manta`; the base's where empty."""
    namespace: str = ""
    """The base's where empty."""


def base_of(config: ClusterConfig) -> str:
    """The overlay among those that ship that comes nearest."""
    if config.engine.kind == "sim":
        return "cpu"
    return "gpu-pd" if any(pool.role == "prefill" for pool in config.pools) else "gpu"


def overlay(
    config: ClusterConfig,
    base: list[Object],
    base_path: str,
    versions: Versions | None = None,
    naming: Naming | None = None,
) -> Overlay:
    """The overlay over `base`, rendered, which kustomize finds at `base_path` from the overlay's folder.

    Raises ExportError, with a line per finding, for what can't be said in these manifests, and where the result would
    not work.
    """
    if refused := list(_refused(config)):
        raise ExportError("\n".join(refused))
    naming = naming or Naming()
    made = fitted(base, config)
    files = _patches(base, made)
    image = _image(config, base, versions, naming.image)
    objects = [with_image(item, image) for item in made] if image else made
    if naming.namespace:
        objects = in_namespace(objects, naming.namespace)
    if findings := check(objects, versions):
        raise ExportError("\n".join(map(str, findings)))
    kustomization: dict[Any, Any] = {
        Note(_HEAD.format(name=config.name, mark=MARK)): None,
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [base_path],
    }
    if naming.namespace:
        kustomization["namespace"] = naming.namespace
    if image:
        kustomization["images"] = [image]
    kustomization["patches"] = [{"path": name, "target": target} for name, (target, _) in files.items()]
    texts = {name: text for name, (_, text) in files.items()}
    return Overlay({FILE: render(kustomization)} | texts, objects)


def _refused(config: ClusterConfig) -> Iterator[str]:
    """What these manifests can't say, and what they can't serve well."""
    try:
        require_device(config)
    except ExportError as error:
        yield str(error)
    if config.http.host not in ("0.0.0.0", "::"):
        yield f"http.host is {config.http.host}; needed: 0.0.0.0, for Services (and keys in router.tenants)"
    if config.http.port != SERVE_PORT:
        yield f"http.port is {config.http.port}; needed: {SERVE_PORT}, which probes, Services and policies know"
    if config.http.proxy_location != "EveryNode":
        yield f"http.proxy_location is {config.http.proxy_location}; needed: EveryNode, by whose proxy a pod is ready"
    if not config.placement.use_roles:
        yield "placement.use_roles is false; needed: true, so that routers and replicas keep to their pods"
    if config.router.replicas > 1 and config.placement.max_routers_per_node != 1:
        yield "placement.max_routers_per_node is not 1; needed: 1, or a pod is left without a router and never ready"
    yield from _refused_pools(config)
    for name, tenant in config.router.tenants.items():
        if any(not key.startswith("env:") for key in tenant.api_keys):
            yield f"router.tenants.{name}.api_keys has a key itself; needed: env:NAME, and the key in a Secret"
    if config.router.admin_key and not config.router.admin_key.startswith("env:"):
        yield "router.admin_key is a key itself; needed: env:NAME, and the key in a Secret"
    if config.cache.remote.uri.startswith("file:"):
        yield f"cache.remote.uri is {config.cache.remote.uri}; needed: s3:// or gs://, as pods share no folder"


def _refused_pools(config: ClusterConfig) -> Iterator[str]:
    longest = config.router.limits.answer_timeout_s
    for pool in config.pools:
        most = pool.autoscaling.max_replicas if pool.autoscaling else pool.replicas
        if pool.drain_timeout_s < longest:
            yield (
                f"pools.{pool.role}.drain_timeout_s is {pool.drain_timeout_s:g}; needed: {longest:g} at least, "
                "router.limits.answer_timeout_s, or an upgrade cuts the longest requests. 900 for both is what "
                "k8s/ has: lower the one, or raise the other"
            )
        whole = config.engine.kind == "vllm" and config.engine.device == "cuda"
        if not whole and most > 1 and config.placement.max_replicas_per_node != 1:
            yield (
                f"placement.max_replicas_per_node is not 1; needed: 1 for {most} {pool.role} replicas, or Serve puts "
                "several into one pod, and a pod without any is never ready"
            )


def _patches(base: list[Object], made: list[Object]) -> dict[str, tuple[dict[str, str], str]]:
    """File name -> what it patches and its text."""
    after = {name_of(item): item for item in made}
    files = {}
    for item in base:
        kind, name = item["kind"], item["metadata"]["name"]
        file = "rayservice.yaml" if kind == "RayService" else f"{kind.lower()}-{name}.yaml"
        target = {"kind": kind, "name": name}
        if name_of(item) not in after:
            gone = {"apiVersion": item["apiVersion"], "kind": kind, "metadata": {"name": name}}
            files[file] = (target, render({"$patch": "delete", **gone}))
        elif operations := list(json_patch.difference(item, after[name_of(item)])):
            files[file] = (target, "".join(_listed(operation) for operation in operations))
    return files


def _listed(operation: json_patch.Operation) -> str:
    """An operation as an item of a YAML list."""
    first, *rest = render(operation).splitlines()
    return "\n".join([f"- {first}", *(f"  {line}".rstrip() for line in rest)]) + "\n"


def _image(
    config: ClusterConfig, base: list[Object], versions: Versions | None, wanted: str
) -> dict[str, str] | None:
    """An entry of `images`; None where the base's image is right."""
    name, tag = split_image(workloads(ray_services(base))[0].main["image"])
    given = f"-{lock_of(config)}-" in tag or tag.startswith("@")
    if not given and versions is None:
        raise ExportError(f"the base's image is {name}:{tag}, not for {lock_of(config)}; give another --base")
    new_tag = tag if given or versions is None else versions.tag(lock_of(config))
    if (wanted or name, new_tag) == (name, tag):
        return None
    return {"name": name, "newName": wanted or name} | (
        {"digest": tag.removeprefix("@")} if new_tag.startswith("@") else {"newTag": new_tag}
    )


_HEAD = """\
{name} on KubeRay, {mark}; k8s/README.md says what comes before.

   kubectl apply --server-side -k FOLDER

Export again after a change of the configuration. Changes of your own belong in an overlay over this one."""
