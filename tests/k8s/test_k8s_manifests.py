"""The manifests that ship are valid to the last field."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_manifests import K8S, OVERLAYS, overlay, ray_service, secrets, versions
from k8s_schemas import KUBERNETES, crd_errors, crd_folder, kubernetes_errors, needs_crds, strict
from ray.scripts.scripts import start

from cluster.export import serve_config
from cluster.k8s.checks import check
from cluster.k8s.kustomize import load_objects, render
from cluster.k8s.ray_checks import START_FLAGS, START_NUMBERS, START_TEXTS
from cluster.k8s.serve_config import read_serve_config


def test_there_are_the_overlays_that_are_promised() -> None:
    assert {"cpu", "gpu", "gpu-pd", "ha"} <= {*OVERLAYS}


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_code_checks_find_nothing(name: str) -> None:
    assert [str(finding) for finding in check(overlay(name), versions(), secrets())] == []


@needs_crds
@pytest.mark.parametrize("name", OVERLAYS)
def test_the_service_fits_kuberays_schema_made_strict(name: str) -> None:
    assert crd_errors(ray_service(overlay(name))) == []


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", OVERLAYS)
def test_every_object_and_pod_template_fits_kubernetes_schema(name: str, version: str) -> None:
    assert kubernetes_errors(overlay(name), version) == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_serve_config_is_what_ray_serve_takes(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    data, served = read_serve_config(ray_service(overlay(name))["spec"]["serveConfigV2"])
    parsed = ServeDeploySchema.model_validate(data)
    assert [application.name for application in parsed.applications] == [served.config.name]


@pytest.mark.parametrize("name", OVERLAYS)
@pytest.mark.usefixtures("no_cluster")
def test_the_deployments_ask_ray_for_what_the_code_would_ask(name: str) -> None:
    _, served = read_serve_config(ray_service(overlay(name))["spec"]["serveConfigV2"])
    for deployment in serve_config(served.config)["applications"][0]["deployments"]:
        options = served.deployments[deployment["name"]].get("ray_actor_options")
        if options is not None:
            assert options == deployment["ray_actor_options"]


@pytest.mark.parametrize("name", ["gpu", "ha"])
@pytest.mark.parametrize("option", sorted((K8S / "options").glob("*.yaml")), ids=lambda path: path.stem)
def test_options_fit_the_overlays_that_they_are_for(tmp_path: Path, option: Path, name: str) -> None:
    shutil.copy(option, tmp_path)
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(K8S / "overlays" / name, tmp_path)],
        "patches": [{"path": option.name, "target": {"kind": "RayService", "name": "manta"}}],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    objects = render(tmp_path)
    assert objects != overlay(name)
    assert check(objects, versions(), secrets()) == []
    if (crd_folder() / "ray.io_rayservices.yaml").is_file():
        assert crd_errors(ray_service(objects)) == []


@pytest.mark.parametrize("entry", sorted((K8S / "gateway").glob("*.yaml")), ids=lambda path: path.stem)
def test_entries_lead_to_services_that_are_there(entry: Path) -> None:
    objects = load_objects(entry)
    assert check(overlay("gpu") + objects, versions(), secrets()) == []
    assert kubernetes_errors(objects, KUBERNETES[-1]) == []
    misled = yaml.safe_load(yaml.safe_dump(objects).replace("manta-serve-svc", "manta-serve"))
    assert any(
        "there is no Service manta-serve;" in str(finding) for finding in check(overlay("gpu") + misled)
    )


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_key_of_a_secret_that_is_asked_for_is_in_the_example(name: str) -> None:
    example = {
        (item["metadata"]["name"], key)
        for item in load_objects(K8S / "base" / "secrets.example.yaml")
        for key in item["stringData"]
    }
    asked = {(ref["name"], ref["key"]) for item in overlay(name) for ref in secret_key_refs(item)}
    assert asked
    assert asked - example == set()


def secret_key_refs(data: Any) -> Iterator[dict[str, Any]]:
    if isinstance(data, dict):
        if "secretKeyRef" in data:
            yield data["secretKeyRef"]
        for value in data.values():
            yield from secret_key_refs(value)
    elif isinstance(data, list):
        for value in data:
            yield from secret_key_refs(value)


def test_no_file_in_a_folder_of_manifests_is_forgotten() -> None:
    """What stands in a kustomization's folder is in it, or is an example or an option by its name or folder."""
    forgotten = []
    for path in K8S.rglob("kustomization.yaml"):
        text = path.read_text(encoding="utf-8")
        others = [
            other for other in path.parent.glob("*.yaml") if other != path and "example" not in other.name
        ]
        forgotten += [str(other.relative_to(K8S)) for other in others if other.name not in text]
    assert forgotten == []


def plain_yaml() -> list[Path]:
    """Files that are YAML as they stand; the chart's templates become it."""
    return sorted(path for path in K8S.rglob("*.yaml") if "templates" not in path.parts)


@pytest.mark.parametrize("path", plain_yaml(), ids=lambda path: str(path.relative_to(K8S)))
def test_every_file_is_yaml_without_a_key_that_is_there_twice(path: Path) -> None:
    for node in yaml.compose_all(path.read_text(encoding="utf-8")):
        assert repeated_keys(node) == []


def repeated_keys(node: Any) -> list[str]:
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        inner = [name for _, value in node.value for name in repeated_keys(value)]
        return [key for key in {*keys} if keys.count(key) > 1] + inner
    if isinstance(node, yaml.SequenceNode):
        return [name for value in node.value for name in repeated_keys(value)]
    return []


def test_the_options_of_ray_start_that_are_known_are_those_of_ray() -> None:
    options = {name.removeprefix("--"): option for option in start.params for name in option.opts}
    assert {*START_FLAGS, *START_NUMBERS, *START_TEXTS} <= options.keys()
    assert all(options[name].is_flag for name in START_FLAGS)


def test_a_schema_made_strict_refuses_what_it_does_not_name_and_keeps_what_is_open() -> None:
    schema = {
        "properties": {
            "a": {"type": "object", "properties": {"b": {"default": 1}}, "required": ["b"]},
            "free": {"x-kubernetes-preserve-unknown-fields": True, "properties": {"c": {}}},
            "labels": {"additionalProperties": {"type": "string"}},
        }
    }
    made = strict(schema)
    assert made["additionalProperties"] is False
    assert made["properties"]["a"]["additionalProperties"] is False
    assert made["properties"]["a"]["required"] == []
    assert "additionalProperties" not in made["properties"]["free"]
    assert made["properties"]["labels"]["additionalProperties"] == {"type": "string"}
