"""`manta export k8s`: an overlay for a configuration, or the reasons why there can be none."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_manifests import K8S, ROOT, ray_service, secrets, versions
from k8s_mutations import container, engines, pod, routers, volume
from k8s_schemas import KUBERNETES, crd_errors, crd_folder, kubernetes_errors
from typer.testing import CliRunner

import cluster.cli
from cluster.config import ClusterConfig
from cluster.export import ExportError
from cluster.k8s.checks import check
from cluster.k8s.export import Naming, base_of, overlay
from cluster.k8s.folders import export_folder
from cluster.k8s.kustomize import KustomizeError, ordered, render
from cluster.k8s.serve_config import read_serve_config

pytestmark = pytest.mark.usefixtures("no_cluster")

GPU: dict[str, Any] = {
    "name": "law",
    "model": {"path": "org/law-8b", "name": "law"},
    "engine": {"device": "cuda", "args": {"tensor-parallel-size": 4, "revision": "abc123"}},
    "pools": [
        {
            "role": "unified",
            "drain_timeout_s": 1200,
            "autoscaling": {"min_replicas": 3, "max_replicas": 6},
            "resources": {"gpus_per_node": 8},
        }
    ],
    "router": {
        "replicas": 3,
        "limits": {"answer_timeout_s": 1200},
        "tenants": {"a": {"api_keys": ["env:KEY_A"]}, "b": {"api_keys": ["env:KEY_B", "env:KEY_C"]}},
    },
    "cache": {"share": "auto", "disk": {"path": "/mnt/manta/kv", "mib": 409600}},
    "placement": {"use_roles": True, "max_routers_per_node": 1},
    "http": {"host": "0.0.0.0"},
    "ray": {"object_store_mib": 65536},
}
PD = GPU | {
    "pools": [
        {"role": "decode", "replicas": 3, "drain_timeout_s": 1200},
        {"role": "prefill", "replicas": 1, "drain_timeout_s": 1200},
    ]
}
SPANNING = GPU | {
    "engine": {"device": "cuda", "args": {"tensor-parallel-size": 8, "pipeline-parallel-size": 2}},
    "pools": [{"role": "unified", "replicas": 2, "drain_timeout_s": 1200}],
}
FOLDER = GPU | {"model": {"path": "/models/law-8b"}, "cache": {}}
CPU = GPU | {
    "engine": {"device": "cpu"},
    "pools": [{"drain_timeout_s": 1200, "resources": {"cores": 8}}],
    "cache": {},
    "ray": {},
}
SIM = {key: value for key, value in GPU.items() if key not in ("model", "cache", "ray")} | {
    "engine": {"kind": "sim"},
    "pools": [{"replicas": 3, "drain_timeout_s": 1200}],
    "placement": {"use_roles": True, "max_routers_per_node": 1, "max_replicas_per_node": 1},
}
UNLIKE = GPU | {"pools": [{"role": "decode", "replicas": 2, "drain_timeout_s": 1200}]}
CONFIGS = {
    "gpu": GPU, "pd": PD, "spanning": SPANNING, "folder": FOLDER, "cpu": CPU, "sim": SIM, "unlike": UNLIKE
}  # fmt: skip


def exported(tmp_path: Path, data: dict[str, Any], naming: Naming | None = None) -> list[dict[str, Any]]:
    """What kustomize makes of the folder that is written."""
    export_folder(ClusterConfig.parse(data), tmp_path / "mine", naming=naming)
    return render(tmp_path / "mine")


def changed(data: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return data | {name: {**data.get(name, {}), **fields} for name, fields in sections.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_exported_passes_every_check(tmp_path: Path, name: str) -> None:
    objects = exported(tmp_path, CONFIGS[name])
    assert check(objects, versions(), secrets()) == []
    assert kubernetes_errors(objects, KUBERNETES[-1]) == []
    if (crd_folder() / "ray.io_rayservices.yaml").is_file():
        assert crd_errors(ray_service(objects)) == []


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl, which has kustomize in it, is not installed"
)
@pytest.mark.parametrize("name", CONFIGS)
def test_kustomize_makes_the_same_of_it(tmp_path: Path, name: str) -> None:
    objects = exported(tmp_path, CONFIGS[name])
    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path / "mine")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ordered(list(yaml.safe_load_all(done.stdout))) == ordered(objects)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_served_is_the_configuration(tmp_path: Path, name: str) -> None:
    given = ClusterConfig.parse(CONFIGS[name])
    served = read_serve_config(ray_service(exported(tmp_path, CONFIGS[name]))["spec"]["serveConfigV2"])[1]
    for section in ("model", "engine", "cache", "http"):
        assert getattr(served.config, section) == getattr(given, section)
    assert served.config.placement.nodes_timeout_s is None
    assert served.limits == given.router.limits
    assert {pool.role for pool in given.pools} | {"router"} == {*served.deployments}


def test_pods_are_as_many_and_as_large_as_the_replicas_need(tmp_path: Path) -> None:
    service = ray_service(exported(tmp_path, GPU))
    group = engines([service])
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (3, 3, 6)
    base = engines([ray_service(render(K8S / "overlays" / "gpu"))])
    limits, before = (container(g)["resources"]["limits"] for g in (group, base))
    assert limits["nvidia.com/gpu"] == "4"
    assert int(limits["cpu"]) == 4 * int(before["cpu"])
    assert group["rayStartParams"]["object-store-memory"] == str(64 << 30)
    assert volume(group, "shm")["emptyDir"]["sizeLimit"] == "66Gi"
    assert volume(group, "kv")["emptyDir"]["sizeLimit"] == "440Gi"
    assert limits == container(group)["resources"]["requests"]
    assert routers([service])["replicas"] == 3


def test_a_replica_that_spans_nodes_gets_as_many_pods(tmp_path: Path) -> None:
    group = engines([ray_service(exported(tmp_path, SPANNING))])
    assert (group["replicas"], group["numOfHosts"]) == (2, 2)
    assert container(group)["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_waiting_times_follow_the_longest_request(tmp_path: Path) -> None:
    service = ray_service(exported(tmp_path, GPU))
    waits = service["spec"]["rayClusterDeletionDelaySeconds"]
    assert waits > 1230
    for group in (routers([service]), engines([service])):
        assert container(group)["lifecycle"]["preStop"]["exec"]["command"][-1] == str(waits)
        assert pod(group)["terminationGracePeriodSeconds"] > waits


def test_routers_get_the_keys_that_the_configuration_names_and_no_others(tmp_path: Path) -> None:
    env = container(routers([ray_service(exported(tmp_path, GPU))]))["env"]
    keys = [item["name"] for item in env if "secretKeyRef" in item.get("valueFrom", {})]
    assert keys == ["MANTA_SECRET", "KEY_A", "KEY_B", "KEY_C"]


def test_a_model_of_the_hub_is_fetched_and_waited_for(tmp_path: Path) -> None:
    objects = exported(tmp_path, GPU)
    job = next(item for item in objects if item["kind"] == "Job")
    given = {
        item["name"]: item.get("value") for item in job["spec"]["template"]["spec"]["containers"][0]["env"]
    }
    assert (given["MODEL"], given["REVISION"]) == ("org/law-8b", "abc123")
    waiting = pod(engines([ray_service(objects)]))["initContainers"][0]["env"]
    assert {"name": "MODEL", "value": "org/law-8b@abc123"} in waiting


def test_nothing_is_fetched_for_a_model_in_a_folder(tmp_path: Path) -> None:
    objects = exported(tmp_path, FOLDER)
    assert not any(item["kind"] == "Job" for item in objects)
    assert "initContainers" not in pod(engines([ray_service(objects)]))
    assert not any(item["name"] == "kv" for item in pod(engines([ray_service(objects)]))["volumes"])


def test_engines_on_cpus_take_the_image_for_cpus_and_no_gpus(tmp_path: Path) -> None:
    objects = exported(tmp_path, CPU, Naming(image="registry.internal/manta"))
    group = engines([ray_service(objects)])
    assert container(group)["image"] == f"registry.internal/manta:{versions().tag('cpu')}"
    assert "nvidia.com/gpu" not in container(group)["resources"]["limits"]
    assert int(container(group)["resources"]["limits"]["cpu"]) == 9
    assert "tolerations" not in pod(group)


def test_a_role_that_the_base_lacks_gets_a_group_after_its_own_kind(tmp_path: Path) -> None:
    group = engines([ray_service(exported(tmp_path, UNLIKE))])
    assert group["groupName"] == "decode"
    assert group["resources"] == {"manta_decode": "1000"}
    assert group["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == "decode"


def test_another_namespace_takes_all_objects(tmp_path: Path) -> None:
    objects = exported(tmp_path, PD, Naming(namespace="law"))
    assert {item["metadata"]["namespace"] for item in objects if item["kind"] != "Namespace"} == {"law"}
    assert [item["metadata"]["name"] for item in objects if item["kind"] == "Namespace"] == ["law"]


@pytest.mark.parametrize(("data", "base"), [(GPU, "gpu"), (PD, "gpu-pd"), (CPU, "gpu"), (SIM, "cpu")])
def test_the_nearest_overlay_is_the_base(data: dict[str, Any], base: str) -> None:
    assert base_of(ClusterConfig.parse(data)) == base


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GPU | {"engine": {}}, "engine.device is auto; needed: cpu or cuda"),
        (GPU | {"http": {}}, "http.host is 127.0.0.1; needed: 0.0.0.0"),
        (changed(GPU, http={"port": 80}), "http.port is 80; needed: 8000"),
        (changed(GPU, http={"proxy_location": "HeadOnly"}), "http.proxy_location is HeadOnly"),
        (changed(GPU, placement={"use_roles": False}), "placement.use_roles is false"),
        (changed(GPU, placement={"max_routers_per_node": None}), "placement.max_routers_per_node is not 1"),
        (
            changed(SIM, placement={"max_replicas_per_node": None}),
            "max_replicas_per_node is not 1; needed: 1 for 3",
        ),
        (changed(GPU, router={"limits": {}}), "pools.unified.drain_timeout_s is 1200; needed: 3600 at least"),
        (
            changed(GPU, router={"tenants": {"a": {"api_keys": ["s3cret"]}}}),
            "router.tenants.a.api_keys has a key",
        ),
        (changed(GPU, router={"admin_key": "s3cret"}), "router.admin_key is a key itself"),
        (changed(GPU, cache={"remote": {"uri": "file:///mnt/x"}}), "cache.remote.uri is file:///mnt/x"),
        (changed(GPU, model={"path": "/data/law"}), "/data/law is on no volume of the unified pods"),
        (changed(GPU, model={"adapters": {"a": "/data/a"}}), "/data/a is on no volume"),
        (changed(GPU, cache={"dram": {"mib": 65000}}), "cache.dram.mib is 65000; needed: at most 0.9"),
    ],
)
def test_what_can_not_be_exported_is_told_with_what_is_needed(
    tmp_path: Path, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExportError) as caught:
        export_folder(ClusterConfig.parse(data), tmp_path / "mine")
    assert message in str(caught.value)
    assert not (tmp_path / "mine").exists()


def test_all_reasons_are_told_at_once() -> None:
    config = ClusterConfig.parse(GPU | {"http": {}, "placement": {}})
    with pytest.raises(ExportError) as caught:
        overlay(config, [], "../base")
    assert len(str(caught.value).splitlines()) == 3


def test_a_patch_no_longer_applies_when_the_base_has_other_groups(tmp_path: Path) -> None:
    shutil.copytree(K8S, tmp_path / "k8s")
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    export_folder(ClusterConfig.parse(GPU), tmp_path / "mine", tmp_path / "k8s" / "overlays" / "gpu")
    service = tmp_path / "k8s" / "base" / "rayservice.yaml"
    service.write_text(service.read_text().replace("groupName: router", "groupName: front"))
    with pytest.raises(KustomizeError, match="'front'; the patch was made for 'router'"):
        render(tmp_path / "mine")


def test_the_command_writes_the_folder_and_tells_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "law.yaml").write_text(yaml.safe_dump(GPU))
    arguments = ["export", "k8s", str(tmp_path / "law.yaml"), "-o", str(tmp_path / "mine")]
    done = CliRunner().invoke(cluster.cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert "kustomization.yaml" in done.stdout
    assert "rayservice.yaml" in done.stdout
    # The same again: what it wrote itself it may replace.
    assert CliRunner().invoke(cluster.cli.app, arguments).exit_code == 0


def test_a_base_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"none holds no kustomization\.yaml; needed: --base"):
        export_folder(ClusterConfig.parse(GPU), tmp_path / "mine", tmp_path / "none")


def test_a_key_that_the_base_names_and_the_configuration_does_not_is_left_out(tmp_path: Path) -> None:
    keyless = GPU | {"router": {"replicas": 3, "limits": {"answer_timeout_s": 1200}}}
    env = container(routers([ray_service(exported(tmp_path, keyless))]))["env"]
    assert [item["name"] for item in env if "valueFrom" in item] == ["MANTA_SECRET"]


def test_the_command_does_not_write_over_the_work_of_others(tmp_path: Path) -> None:
    (tmp_path / "law.yaml").write_text(yaml.safe_dump(GPU))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kustomization.yaml").write_text("resources: []\n")
    done = CliRunner().invoke(
        cluster.cli.app, ["export", "k8s", str(tmp_path / "law.yaml"), "-o", str(tmp_path / "mine")]
    )
    assert done.exit_code == 1
    assert "is not of `manta export k8s`" in done.stderr
    assert (tmp_path / "mine" / "kustomization.yaml").read_text() == "resources: []\n"
