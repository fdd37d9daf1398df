"""Rendering as kustomize does it, and patches that say what they were made for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from k8s_manifests import K8S, OVERLAYS

from cluster.k8s import json_patch, merge_patch
from cluster.k8s.kustomize import KustomizeError, ordered, render, split_image
from cluster.k8s.quantity import QuantityError, parse, text

KUBECTL = shutil.which("kubectl")
needs_kubectl = pytest.mark.skipif(
    KUBECTL is None, reason="kubectl, which has kustomize in it, is not installed"
)

HEADER = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
BASE = {
    "kustomization.yaml": HEADER
    + """\
resources: [objects.yaml]
images:
  - name: manta
    newName: registry.example/manta
    newTag: "1.2"
labels:
  - pairs: {app.kubernetes.io/part-of: manta}
    includeTemplates: true
""",
    "objects.yaml": """\
apiVersion: ray.io/v1
kind: RayService
metadata: {name: manta}
spec:
  rayClusterConfig:
    headGroupSpec:
      template:
        spec:
          containers:
            - {name: ray-head, image: manta}
    workerGroupSpecs:
      - groupName: router
        replicas: 1
        template:
          spec:
            initContainers: [{name: pull, image: "manta:old"}]
            containers: [{name: ray-worker, image: "other:5000/manta@sha256:00"}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: redis, namespace: elsewhere}
spec:
  template:
    metadata: {labels: {app: redis}}
    spec:
      containers:
        - name: redis
          image: redis:7.2
          env: [{name: A, value: a}, {name: B, value: b}]
          ports: [{containerPort: 6379, name: redis}]
          volumeMounts: [{name: data, mountPath: /data}]
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: head}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: head}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: head}
subjects: [{kind: ServiceAccount, name: head}]
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: gone}
spec: {minAvailable: 1}
""",
}
OVERLAY = {
    "kustomization.yaml": HEADER
    + """\
resources: [../base]
components: [../component]
namespace: serving
images:
  - name: redis
    digest: sha256:1111
patches:
  - path: service.yaml
    target: {kind: RayService, name: manta}
  - path: merged.yaml
  - patch: |-
      $patch: delete
      apiVersion: policy/v1
      kind: PodDisruptionBudget
      metadata: {name: gone}
""",
    "service.yaml": """\
- {op: test, path: /spec/rayClusterConfig/workerGroupSpecs/0/groupName, value: router}
- {op: replace, path: /spec/rayClusterConfig/workerGroupSpecs/0/replicas, value: 3}
- op: add
  path: /spec/rayClusterConfig/workerGroupSpecs/-
  value: {groupName: decode, template: {spec: {containers: [{name: ray-worker, image: manta}]}}}
- {op: add, path: /metadata/annotations, value: {a~b/c: d}}
- {op: replace, path: /metadata/annotations/a~0b~1c, value: e}
""",
    "merged.yaml": """\
apiVersion: apps/v1
kind: Deployment
metadata: {name: redis, namespace: elsewhere}
spec:
  template:
    spec:
      containers:
        - name: redis
          env: [{name: B, value: other}, {name: C, value: c}]
          ports: [{containerPort: 6379, name: db}, {containerPort: 9121, name: metrics}]
          volumeMounts: [{name: data, mountPath: /data, $patch: delete}]
        - {name: exporter, image: exporter:1}
      nodeSelector: {disk: ssd}
""",
}
COMPONENT = {
    "kustomization.yaml": """\
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
resources: [extra.yaml]
patches:
  - target: {kind: RayService}
    patch: |-
      - {op: add, path: /spec/serveConfigV2, value: "a: b\\n"}
""",
    "extra.yaml": "{apiVersion: v1, kind: Namespace, metadata: {name: any}}\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder of kustomizations that use every part of kustomize that is known."""
    for folder, files in (("base", BASE), ("overlay", OVERLAY), ("component", COMPONENT)):
        (tmp_path / folder).mkdir()
        for name, content in files.items():
            (tmp_path / folder / name).write_text(content)
    return tmp_path


def real_kustomize(folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(KUBECTL), "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@needs_kubectl
def test_what_is_rendered_here_is_what_kustomize_renders(tree: Path) -> None:
    assert ordered(render(tree / "overlay")) == ordered(real_kustomize(tree / "overlay"))


@needs_kubectl
@pytest.mark.parametrize("name", OVERLAYS)
def test_every_overlay_renders_as_kustomize_renders_it(name: str) -> None:
    folder = K8S / "overlays" / name
    assert ordered(render(folder)) == ordered(real_kustomize(folder))


def test_the_parts_of_a_kustomization_are_applied(tree: Path) -> None:
    objects = {(item["kind"], item["metadata"]["name"]): item for item in render(tree / "overlay")}
    assert ("PodDisruptionBudget", "gone") not in objects
    assert objects["Namespace", "serving"]["metadata"]["name"] == "serving"
    service = objects["RayService", "manta"]
    assert service["metadata"]["namespace"] == "serving"
    assert service["metadata"]["annotations"] == {"a~b/c": "e"}
    assert service["spec"]["serveConfigV2"] == "a: b\n"
    router, decode = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert router["replicas"] == 3
    assert router["template"]["spec"]["initContainers"][0]["image"] == "registry.example/manta:1.2"
    assert router["template"]["spec"]["containers"][0]["image"] == "other:5000/manta@sha256:00"
    # Images are set before an overlay adds its own.
    assert decode["template"]["spec"]["containers"][0]["image"] == "manta"
    template = objects["Deployment", "redis"]["spec"]["template"]
    assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "manta"
    containers = {container["name"]: container for container in template["spec"]["containers"]}
    assert containers["redis"]["image"] == "redis@sha256:1111"
    assert {item["name"]: item["value"] for item in containers["redis"]["env"]} == {
        "A": "a",
        "B": "other",
        "C": "c",
    }
    assert objects["RoleBinding", "head"]["subjects"][0]["namespace"] == "serving"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("resources: [../base]\nreplacements: []\n", "replacements: not known"),
        ("resources: [missing.yaml]\n", "missing.yaml: can't be read"),
        ("resources: [../base, ../base]\n", "RayService manta is there twice"),
        ("resources: [../base]\npatches: [{patch: '[]', target: {kind: Job}}]\n", "a patch finds no Job"),
        (
            "resources: [../base]\npatches:\n"
            "- {target: {kind: RayService}, patch: '[{op: test, path: /kind, value: Job}]'}\n",
            "/kind is 'RayService'; the patch was made for 'Job'",
        ),
        ("resources: [../base]\nlabels: [{pairs: {a: b}, includeSelectors: true}]\n", "labels: only pairs"),
        ("resources: [: bad\n", "not valid YAML"),
    ],
)
def test_what_can_not_be_rendered_is_an_error_that_says_why(tree: Path, content: str, message: str) -> None:
    (tree / "overlay" / "kustomization.yaml").write_text(HEADER + content)
    with pytest.raises(KustomizeError, match=message.replace("[", r"\[")) as caught:
        render(tree / "overlay")
    assert "kustomization.yaml" in str(caught.value) or "missing.yaml" in str(caught.value)


SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3)
NAMED = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from("abcd")}, optional={"x": SCALARS, "y": st.lists(SCALARS)}),
    max_size=4,
    unique_by=lambda item: item["name"],
)
TREES = st.recursive(
    SCALARS | NAMED,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b/c", "~"]), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(before=TREES, after=TREES)
def test_a_difference_applied_to_the_one_gives_the_other(before: Any, after: Any) -> None:
    operations = list(json_patch.difference(before, after))
    made = json_patch.apply(before, operations)
    assert repr(made) == repr(after) or made == after
    assert operations or before == after


def test_a_difference_is_guarded_by_the_names_of_what_it_changes() -> None:
    before = {"groups": [{"groupName": "router", "n": 1}, {"groupName": "decode", "n": 1}]}
    after = {"groups": [{"groupName": "decode", "n": 2}, {"groupName": "prefill", "n": 1}]}
    operations = list(json_patch.difference(before, after))
    assert [(operation["op"], operation["path"]) for operation in operations] == [
        ("test", "/groups/0/groupName"),
        ("remove", "/groups/0"),
        ("test", "/groups/0/groupName"),
        ("replace", "/groups/0/n"),
        ("add", "/groups/-"),
    ]
    with pytest.raises(json_patch.PatchError, match="the patch was made for 'router'"):
        json_patch.apply({"groups": before["groups"][1:]}, operations)


def test_lists_of_a_custom_kind_are_replaced_and_those_of_a_known_kind_merged() -> None:
    spec = {"spec": {"containers": [{"name": "a", "image": "x"}, {"name": "b", "image": "y"}]}}
    patch = {"spec": {"containers": [{"name": "b", "image": "z"}]}}
    custom = merge_patch.apply({"apiVersion": "ray.io/v1", "kind": "RayService", **spec}, patch)
    assert [item["image"] for item in custom["spec"]["containers"]] == ["z"]
    pod = merge_patch.apply({"apiVersion": "v1", "kind": "Pod", **spec}, patch)
    assert [item["image"] for item in pod["spec"]["containers"]] == ["z", "x"]


@pytest.mark.parametrize(
    ("image", "parts"),
    [
        ("manta", ("manta", "")),
        ("manta:1.0", ("manta", "1.0")),
        ("host:5000/manta", ("host:5000/manta", "")),
        ("host:5000/manta:1.0", ("host:5000/manta", "1.0")),
        ("host:5000/manta@sha256:ab", ("host:5000/manta", "@sha256:ab")),
    ],
)
def test_an_image_is_a_name_and_a_tag_or_digest(image: str, parts: tuple[str, str]) -> None:
    assert split_image(image) == parts


@pytest.mark.parametrize(
    ("quantity", "size"), [("500m", 0.5), ("4", 4), (2, 2), ("16Gi", 16 << 30), ("1.5k", 1500), ("1e3", 1000)]
)
def test_quantities_are_read_as_kubernetes_reads_them(quantity: Any, size: float) -> None:
    assert parse(quantity) == size


@pytest.mark.parametrize("quantity", ["", "4 Gi", "2Gb", "-1", "1Gi2", True, None, "Mi", "1,5"])
def test_what_is_no_quantity_is_refused(quantity: Any) -> None:
    with pytest.raises(QuantityError, match="is no quantity"):
        parse(quantity)


@given(st.integers(0, 1 << 50))
def test_a_size_written_as_a_quantity_reads_as_the_same_size(size: int) -> None:
    assert parse(text(size)) == size
