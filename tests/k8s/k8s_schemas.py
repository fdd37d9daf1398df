"""Manifests against the schemas that there are: KubeRay's CRDs made strict, and Kubernetes' own."""

from __future__ import annotations

import copy
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from cluster.k8s.checks import API_VERSIONS
from cluster.k8s.workloads import Workload, identity, workloads

FOLDER = "MANTA_K8S_CRDS"
"""Environment variable: where KubeRay's CRDs are, as in `ray-operator/config/crd/bases` of its repository."""
KUBERNETES = ("1.29", "1.37")
"""Oldest and newest version that the manifests are for."""
_METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def crd_folder() -> Path:
    return Path(os.environ.get(FOLDER) or Path(__file__).parents[3] / "shared" / "k8s-crds")


needs_crds = pytest.mark.skipif(
    not (crd_folder() / "ray.io_rayservices.yaml").is_file(),
    reason=f"KubeRay's CRDs are not in {crd_folder()}; {FOLDER} says where they are",
)


def crd_errors(service: dict[str, Any]) -> list[str]:
    """What KubeRay's schema has against a RayService, typing errors in names of fields included."""
    found = _crd_validator().iter_errors(without_nulls(service))
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in found]


def kubernetes_errors(objects: list[dict[str, Any]], version: str) -> list[str]:
    """What `kubernetes-validate --strict` has against the objects, and against every pod template as a Deployment."""
    checked = [item for item in objects if item.get("kind") not in API_VERSIONS]
    checked += [as_deployment(workload) for workload in workloads(objects)]
    return [error for item in checked for error in _kubernetes_errors(json.dumps(item), version)]


def as_deployment(workload: Workload) -> dict[str, Any]:
    """An object of a kind that every tool knows, with the same pods."""
    template = copy.deepcopy(workload.template)
    # A Deployment takes Always alone, and a schema says nothing of it.
    spec = template.get("spec")
    if isinstance(spec, dict):
        spec.pop("restartPolicy", None)
    labels = {"app": "it"}
    if isinstance(metadata := template.setdefault("metadata", {}), dict):
        metadata["labels"] = (metadata.get("labels") or {}) | labels
    name = (workload.group or workload.where.rpartition(" ")[2]).lower()
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "manta"},
        "spec": {"replicas": 2, "selector": {"matchLabels": labels}, "template": template},
    }


@cache
def _kubernetes_errors(text: str, version: str) -> tuple[str, ...]:
    item = json.loads(text)
    try:
        kubernetes_validate.validate(item, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return (f"{identity(item)}: {'.'.join(map(str, error.absolute_path))}: {error.message[:300]}",)
    except kubernetes_validate.SchemaNotFoundError as error:
        return (f"{identity(item)}: {error.message}",)
    return ()


@cache
def _crd_validator() -> Any:
    crd = yaml.safe_load((crd_folder() / "ray.io_rayservices.yaml").read_text(encoding="utf-8"))
    schema = next(
        item["schema"]["openAPIV3Schema"] for item in crd["spec"]["versions"] if item["name"] == "v1"
    )
    schema = strict(schema)
    schema["properties"] |= {"metadata": _METADATA, "apiVersion": {"const": "ray.io/v1"}}
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return jsonschema.Draft202012Validator(schema)


def strict(schema: Any) -> Any:
    """The schema without room for fields that it does not name, and without demands that a default meets."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items() if key != "properties"}
    if isinstance(properties := schema.get("properties"), dict):
        made["properties"] = {name: strict(inner) for name, inner in properties.items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
        defaulted = {name for name, inner in properties.items() if "default" in inner}
        if isinstance(schema.get("required"), list):
            made["required"] = [name for name in schema["required"] if name not in defaulted]
    return made


def without_nulls(data: Any) -> Any:
    """The API server drops them before it looks."""
    if isinstance(data, dict):
        return {key: without_nulls(value) for key, value in data.items() if value is not None}
    return [without_nulls(item) for item in data] if isinstance(data, list) else data
