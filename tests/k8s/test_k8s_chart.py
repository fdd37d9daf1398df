"""The Helm chart renders what the overlays render."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from k8s_manifests import K8S, OVERLAYS, overlay, ray_service, secrets, versions

from cluster.k8s import json_patch
from cluster.k8s.checks import check
from cluster.k8s.kustomize import name_of, ordered

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")

CHART = K8S / "chart"
DEFAULT = "gpu"
"""The overlay that the chart's own values are."""


def values(name: str) -> dict[str, Any]:
    path = CHART / f"values-{name}.yaml"
    given: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    assert given or name == DEFAULT
    # The overlays bring the namespace along; a chart does so when it is asked to.
    return given | {"namespace": {"create": True}}


def rendered(given: dict[str, Any], release: str = "manta", namespace: str = "manta") -> list[dict[str, Any]]:
    with helm.Chart.load(str(CHART)) as chart:
        texts = chart.render(given, name=release, namespace=namespace)
    return [
        item
        for template, text in texts.items()
        if template.endswith(".yaml")
        for item in yaml.safe_load_all(text)
        if item is not None
    ]


def normalised(objects: list[dict[str, Any]]) -> dict[Any, dict[str, Any]]:
    """By kind and name, the text of serveConfigV2 as what it says, its deployments by name."""
    made = {name_of(item): item for item in ordered(objects)}
    for item in made.values():
        if item["kind"] == "RayService":
            data = yaml.safe_load(item["spec"]["serveConfigV2"])
            for application in data["applications"]:
                application["deployments"].sort(key=lambda deployment: deployment["name"])
            item["spec"]["serveConfigV2"] = data
    return made


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_chart_renders_an_overlays_objects(name: str) -> None:
    chart, kustomize = normalised(rendered(values(name))), normalised(overlay(name))
    assert chart.keys() == kustomize.keys()
    differences = {
        key: found for key in chart if (found := list(json_patch.difference(kustomize[key], chart[key])))
    }
    assert differences == {}


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_chart_has_nothing_that_lint_minds(name: str) -> None:
    report = helm.chart.lint(str(CHART), values(name), strict=True, namespace="manta")
    assert report["errors"] == []
    # An icon is recommended, for catalogues.
    assert [item for item in report["messages"] if item["severity"] > 1] == []


def test_two_releases_do_not_meet() -> None:
    one, two = (rendered({}, release, "serving") for release in ("law", "med"))
    assert not {name_of(item) for item in one} & {name_of(item) for item in two}
    assert {item["metadata"]["namespace"] for item in one} == {"serving"}
    labels = {
        item["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/part-of"]
        for item in one
        if item["kind"] == "NetworkPolicy"
    }
    assert labels == {"law"}
    assert check(one, versions(), secrets()) == []


def test_a_digest_takes_the_tags_place() -> None:
    digest = f"sha256:{'0' * 64}"
    text = yaml.safe_dump(rendered({"image": {"digest": digest}}))
    assert f"registry.example.com/manta@{digest}" in text
    assert versions().tag("gpu") not in text


def test_the_disk_tier_can_be_on_a_volume_of_its_own() -> None:
    given = {"engineDefaults": {"kvStorageClass": "local-nvme", "resources": {"ephemeral-storage": "40Gi"}}}
    objects = rendered(given | {"namespace": {"create": True}})
    assert check(objects, versions(), secrets()) == []
    group = ray_service(objects)["spec"]["rayClusterConfig"]["workerGroupSpecs"][-1]
    kv = next(item for item in group["template"]["spec"]["volumes"] if item["name"] == "kv")
    assert kv["ephemeral"]["volumeClaimTemplate"]["spec"]["storageClassName"] == "local-nvme"


def test_the_chart_is_of_mantas_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == versions().manta


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"egines": []}, "egines"),
        ({"router": {"replica": 2}}, "replica"),
        ({"times": {"drain": "x"}}, "drain"),
    ],
)
def test_a_value_that_the_chart_does_not_know_is_refused(given: dict[str, Any], message: str) -> None:
    with helm.Chart.load(str(CHART)) as chart, pytest.raises(helm.HelmError, match=message):
        chart.validate_schema(given)


def test_every_value_is_used_by_a_template() -> None:
    templates = "\n".join(path.read_text(encoding="utf-8") for path in (CHART / "templates").iterdir())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    unused = [
        f"{section}.{name}"
        for section, inner in defaults.items()
        for name in (inner if isinstance(inner, dict) and section != "upgradeStrategy" else [""])
        if not re.search(rf"\.{name}\b" if name else rf"\.{section}\b", templates)
    ]
    assert unused == []
