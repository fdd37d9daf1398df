"""What `kubectl kustomize FOLDER` would print, for the part of kustomize that Manta's manifests use.

A field that is not known here is an error rather than ignored, so that what is checked is what gets applied.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from cluster.k8s import json_patch, merge_patch

Object = dict[str, Any]
FILE = "kustomization.yaml"
CLUSTER_SCOPED = (
    "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "GatewayClass", "Namespace", "PersistentVolume",
    "PriorityClass", "StorageClass",
)  # fmt: skip
_KNOWN = (
    "apiVersion", "kind", "metadata", "resources", "components", "patches", "images", "namespace", "labels"
)  # fmt: skip
_TEMPLATES = ("CronJob", "DaemonSet", "Deployment", "Job", "ReplicaSet", "StatefulSet")


class KustomizeError(ValueError):
    """Manifests that can't be rendered. The message names the file and what it needs."""


def render(folder: Path) -> list[Object]:
    """The objects of a kustomization, in its order. Raises KustomizeError."""
    return _build(folder, [])


def load_objects(path: Path) -> list[Object]:
    """The objects of a YAML file, or a KustomizeError."""
    try:
        found = [item for item in yaml.safe_load_all(path.read_text(encoding="utf-8")) if item is not None]
    except OSError as error:
        raise KustomizeError(f"{path}: can't be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise KustomizeError(f"{path}: not valid YAML: {error}") from error
    for item in found:
        if not isinstance(item, dict) or not {"apiVersion", "kind"} <= item.keys():
            raise KustomizeError(
                f"{path}: found {str(item)[:60]!r}; needed: an object with apiVersion and kind"
            )
    return found


def _build(folder: Path, objects: list[Object]) -> list[Object]:
    """The kustomization in `folder`, over the objects that there are before it."""
    path = folder / FILE
    found = load_objects(path)
    if len(found) != 1:
        raise KustomizeError(f"{path}: found {len(found)} documents; needed: one")
    spec = found[0]
    if unknown := spec.keys() - set(_KNOWN):
        raise KustomizeError(
            f"{path}: {', '.join(sorted(unknown))}: not known here; needed: {', '.join(_KNOWN)}"
        )
    objects = [*objects]
    for name in spec.get("resources", []):
        there = folder / name
        objects += _build(there, []) if there.is_dir() else load_objects(there)
    if repeated := _repeated(objects):
        raise KustomizeError(f"{path}: {repeated} is there twice")
    for name in spec.get("components", []):
        objects = _build(folder / name, objects)
    for entry in spec.get("patches", []):
        objects = _patched(path, objects, entry)
    for entry in spec.get("images", []):
        objects = [with_image(item, entry) for item in objects]
    for entry in spec.get("labels", []):
        for item in objects:
            _label(path, item, entry)
    return in_namespace(objects, spec["namespace"]) if "namespace" in spec else objects


def _repeated(objects: list[Object]) -> str:
    seen = set()
    for item in objects:
        names = (
            item["apiVersion"],
            item["kind"],
            item["metadata"].get("namespace"),
            item["metadata"]["name"],
        )
        if names in seen:
            return f"{item['kind']} {item['metadata']['name']}"
        seen.add(names)
    return ""


def _patched(path: Path, objects: list[Object], entry: Mapping[str, Any]) -> list[Object]:
    if unknown := entry.keys() - {"path", "patch", "target"}:
        raise KustomizeError(f"{path}: patches: {', '.join(sorted(unknown))}: not known here")
    text = entry["patch"] if "patch" in entry else _read(path.parent / entry["path"])
    patches = [item for item in yaml.safe_load_all(text) if item is not None]
    for patch in patches:
        target = entry.get("target") or _names(path, patch)
        chosen = [_matches(item, target) for item in objects]
        if not any(chosen):
            raise KustomizeError(f"{path}: a patch finds no {target.get('kind')} {target.get('name', '')}")
        try:
            objects = [
                _changed(item, patch) if changes else item
                for item, changes in zip(objects, chosen, strict=True)
            ]
        except json_patch.PatchError as error:
            raise KustomizeError(f"{path}: {target.get('kind')}: {error}") from error
        # One that a patch deletes is left empty by it.
        objects = [item for item in objects if item]
    return objects


def _changed(item: Object, patch: Any) -> Object:
    if isinstance(patch, list):
        changed: Object = json_patch.apply(item, patch)
        return changed
    return merge_patch.apply(item, patch)


def _names(path: Path, patch: Any) -> dict[str, Any]:
    if not isinstance(patch, dict) or "kind" not in patch or "name" not in patch.get("metadata", {}):
        raise KustomizeError(f"{path}: a patch has neither `target` nor kind and name of its own")
    group, _, version = patch["apiVersion"].rpartition("/")
    named = {"name": patch["metadata"]["name"], "namespace": patch["metadata"].get("namespace", "")}
    return {"group": group, "version": version, "kind": patch["kind"], **named}


def _matches(item: Object, target: Mapping[str, Any]) -> bool:
    group, _, version = item["apiVersion"].rpartition("/")
    labels = item["metadata"].get("labels", {})
    wanted = dict(part.split("=") for part in target.get("labelSelector", "").split(",") if part)
    return (
        target.get("group", group) == group
        and target.get("version", version) == version
        and re.fullmatch(target.get("kind") or ".*", item["kind"]) is not None
        and re.fullmatch(target.get("name") or ".*", item["metadata"]["name"]) is not None
        and re.fullmatch(target.get("namespace", ".*"), item["metadata"].get("namespace", "")) is not None
        and wanted.items() <= labels.items()
    )


def containers(data: Any) -> Iterator[dict[str, Any]]:
    """Every entry of a list that is called `containers` or `initContainers`, at any depth, as kustomize looks."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key in ("containers", "initContainers") and isinstance(value, list):
                yield from (item for item in value if isinstance(item, dict))
            yield from containers(value)
    elif isinstance(data, list):
        for item in data:
            yield from containers(item)


def split_image(image: str) -> tuple[str, str]:
    """Name and tag, where a digest belongs to the tag and begins with `@`."""
    name, at, digest = image.partition("@")
    if at:
        return name.partition(":")[0] if "/" not in name.rpartition(":")[2] else name, f"@{digest}"
    head, colon, tag = image.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (image, "")


def with_image(item: Object, entry: Mapping[str, str]) -> Object:
    """A copy in which an entry of `images` is applied: name, and newName, newTag or digest."""
    item = copy.deepcopy(item)
    for container in containers(item):
        name, tag = split_image(container.get("image", ""))
        if name != entry["name"]:
            continue
        tag = f"@{entry['digest']}" if "digest" in entry else entry.get("newTag", tag)
        container["image"] = entry.get("newName", name) + (
            tag if tag.startswith("@") or not tag else f":{tag}"
        )
    return item


def _label(path: Path, item: Object, entry: Mapping[str, Any]) -> None:
    if entry.get("includeSelectors") or entry.keys() - {"pairs", "includeSelectors", "includeTemplates"}:
        raise KustomizeError(f"{path}: labels: only pairs and includeTemplates are known here")
    places = [item]
    if entry.get("includeTemplates") and item["kind"] in _TEMPLATES:
        spec = item["spec"]["jobTemplate"]["spec"] if item["kind"] == "CronJob" else item["spec"]
        places.append(spec["template"])
    for place in places:
        place.setdefault("metadata", {}).setdefault("labels", {}).update(entry["pairs"])


def in_namespace(objects: list[Object], namespace: str) -> list[Object]:
    """Copies in another namespace, subjects of role bindings too."""
    objects = copy.deepcopy(objects)
    for item in objects:
        if item["kind"] == "Namespace":
            item["metadata"]["name"] = namespace
        elif item["kind"] not in CLUSTER_SCOPED:
            item["metadata"]["namespace"] = namespace
    accounts = {item["metadata"]["name"] for item in objects if item["kind"] == "ServiceAccount"} | {
        "default"
    }
    for item in objects:
        for subject in item.get("subjects", []):
            if subject["kind"] == "ServiceAccount" and subject["name"] in accounts:
                subject["namespace"] = namespace
    return objects


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise KustomizeError(f"{path}: can't be read ({error.strerror})") from error


def ordered(objects: list[Object], key: Callable[[Object], Any] = lambda item: name_of(item)) -> list[Object]:
    """Copies, ordered by kind and name: two renderings can be compared."""
    return sorted(copy.deepcopy(objects), key=key)


def name_of(item: Object) -> tuple[str, str, str]:
    """Kind, namespace, name."""
    return item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]
