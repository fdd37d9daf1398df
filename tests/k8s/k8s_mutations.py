"""Mistakes that people make in manifests, each as a change of a rendered overlay."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from k8s_manifests import ray_service

Objects = list[dict[str, Any]]
MUTATIONS: dict[str, Callable[[Objects], None]] = {}
"""What somebody got wrong -> the change, in place."""


FREE = frozenset({
    "annotations", "labels", "limits", "matchLabels", "nodeSelector", "podSelector", "rayStartParams", "requests",
    "resources",
})  # fmt: skip
"""Mappings whose keys are for people to choose: what is wrong in them is for other tests."""


def mutation(change: Callable[[Objects], None]) -> Callable[[Objects], None]:
    MUTATIONS[change.__name__] = change
    return change


def spec_of(objects: Objects) -> dict[str, Any]:
    spec: dict[str, Any] = ray_service(objects)["spec"]
    return spec


def ray(objects: Objects) -> dict[str, Any]:
    cluster: dict[str, Any] = spec_of(objects)["rayClusterConfig"]
    return cluster


def head(objects: Objects) -> dict[str, Any]:
    group: dict[str, Any] = ray(objects)["headGroupSpec"]
    return group


def engines(objects: Objects) -> dict[str, Any]:
    """The last worker group: one that runs engines."""
    group: dict[str, Any] = ray(objects)["workerGroupSpecs"][-1]
    assert group["groupName"] != "router"
    return group


def routers(objects: Objects) -> dict[str, Any]:
    return next(group for group in ray(objects)["workerGroupSpecs"] if group["groupName"] == "router")


def pod(group: dict[str, Any]) -> dict[str, Any]:
    template: dict[str, Any] = group["template"]["spec"]
    return template


def container(group: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = pod(group)["containers"][0]
    return first


def volume(group: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in pod(group)["volumes"] if item["name"] == name)


def of_kind(objects: Objects, kind: str, name: str = "") -> dict[str, Any]:
    return next(o for o in objects if o["kind"] == kind and o["metadata"]["name"].endswith(name))


def in_serve_config(objects: Objects, pattern: str, text: str) -> None:
    changed, times = re.subn(pattern, text, spec_of(objects)["serveConfigV2"], count=1, flags=re.MULTILINE)
    if not times:
        raise LookupError(pattern)
    spec_of(objects)["serveConfigV2"] = changed


def renamed(mapping: dict[str, Any], old: str, new: str) -> None:
    mapping[new] = mapping.pop(old)


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field, by the way to it."""
    if isinstance(data, dict):
        for key, value in data.items():
            if not (path and path[-1] in FREE):
                yield (*path, key)
            yield from places(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from places(value, (*path, index))


# Names and types of fields.


@mutation
def a_field_of_the_service_is_misspelt(objects: Objects) -> None:
    renamed(spec_of(objects), "rayClusterDeletionDelaySeconds", "rayClusterDeletionDelaySecond")


@mutation
def a_field_deep_in_a_probe_is_misspelt(objects: Objects) -> None:
    renamed(container(engines(objects))["livenessProbe"], "failureThreshold", "failureTreshold")


@mutation
def a_field_of_the_pod_stands_in_its_container(objects: Objects) -> None:
    grace = pod(engines(objects)).pop("terminationGracePeriodSeconds")
    container(engines(objects))["terminationGracePeriodSeconds"] = grace


@mutation
def a_number_is_written_as_a_word(objects: Objects) -> None:
    engines(objects)["replicas"] = "two"


@mutation
def a_flag_is_written_as_text(objects: Objects) -> None:
    pod(engines(objects))["securityContext"]["runAsNonRoot"] = "true"


@mutation
def a_list_is_written_as_a_mapping(objects: Objects) -> None:
    container(engines(objects))["env"] = {"MANTA_SECRET": "x"}


@mutation
def a_number_of_an_environment_variable_has_no_quotes(objects: Objects) -> None:
    container(head(objects))["env"][0]["value"] = 1


@mutation
def a_start_parameter_has_no_quotes(objects: Objects) -> None:
    head(objects)["rayStartParams"]["num-cpus"] = 0


@mutation
def a_container_has_no_name(objects: Objects) -> None:
    del container(engines(objects))["name"]


# Sizes.


@mutation
def a_quantity_has_an_unknown_unit(objects: Objects) -> None:
    for kind in ("requests", "limits"):
        container(engines(objects))["resources"][kind]["memory"] = "36GiB"


@mutation
def memory_is_below_shared_memory(objects: Objects) -> None:
    for kind in ("requests", "limits"):
        container(engines(objects))["resources"][kind]["memory"] = volume(engines(objects), "shm")[
            "emptyDir"
        ]["sizeLimit"]


@mutation
def shared_memory_is_below_the_object_store(objects: Objects) -> None:
    volume(engines(objects), "shm")["emptyDir"]["sizeLimit"] = "64Mi"


@mutation
def shared_memory_is_on_a_disk(objects: Objects) -> None:
    del volume(engines(objects), "shm")["emptyDir"]["medium"]


@mutation
def memory_is_overcommitted(objects: Objects) -> None:
    container(engines(objects))["resources"]["requests"]["memory"] = "1Gi"


@mutation
def the_disk_tier_is_larger_than_its_volume(objects: Objects) -> None:
    in_serve_config(objects, r"^( +disk:\n(?:.*\n)*? +mib: )\d+$", r"\g<1>99999999")


@mutation
def disks_are_larger_than_ephemeral_storage(objects: Objects) -> None:
    for kind in ("requests", "limits"):
        container(engines(objects))["resources"][kind]["ephemeral-storage"] = "1Gi"


@mutation
def a_volume_has_no_limit(objects: Objects) -> None:
    del volume(engines(objects), "ray-logs")["emptyDir"]["sizeLimit"]


# What the CRD leaves open.


@mutation
def a_volume_that_is_mounted_is_not_defined(objects: Objects) -> None:
    container(engines(objects))["volumeMounts"][0]["name"] = "shn"


@mutation
def a_group_has_more_pods_at_least_than_at_most(objects: Objects) -> None:
    engines(objects)["minReplicas"] = engines(objects)["maxReplicas"] + 1


@mutation
def the_upgrade_strategy_is_unknown(objects: Objects) -> None:
    spec_of(objects)["upgradeStrategy"]["type"] = "RollingUpdate"


@mutation
def the_pull_policy_is_unknown(objects: Objects) -> None:
    container(engines(objects))["imagePullPolicy"] = "ifNotPresent"


@mutation
def a_start_parameter_is_misspelt(objects: Objects) -> None:
    renamed(engines(objects)["rayStartParams"], "object-store-memory", "object_store_memory")


@mutation
def a_start_parameter_is_no_number(objects: Objects) -> None:
    engines(objects)["rayStartParams"]["object-store-memory"] = "16Gi"


@mutation
def a_container_has_no_image(objects: Objects) -> None:
    del container(engines(objects))["image"]


@mutation
def an_image_is_not_pinned(objects: Objects) -> None:
    container(engines(objects))["image"] = "manta:latest"


@mutation
def an_image_holds_another_ray(objects: Objects) -> None:
    container(head(objects))["image"] = re.sub(r"ray[0-9.]+", "ray2.59.0", container(head(objects))["image"])


@mutation
def the_ray_version_is_another(objects: Objects) -> None:
    ray(objects)["rayVersion"] = "2.9.0"


@mutation
def a_probe_asks_a_port_that_is_not_there(objects: Objects) -> None:
    container(engines(objects))["readinessProbe"]["httpGet"]["port"] = 8001


@mutation
def a_port_that_ray_listens_at_is_declared_as_another(objects: Objects) -> None:
    ports = container(engines(objects))["ports"]
    next(port for port in ports if port["name"] == "metrics")["containerPort"] = 8081


@mutation
def two_groups_have_the_same_name(objects: Objects) -> None:
    engines(objects)["groupName"] = "router"


@mutation
def both_ways_to_say_what_a_node_offers_are_used(objects: Objects) -> None:
    engines(objects)["rayStartParams"]["num-cpus"] = "4"


# What serveConfigV2 says.


@mutation
def the_serve_config_is_no_yaml(objects: Objects) -> None:
    in_serve_config(objects, r"^applications:$", " applications:")


@mutation
def a_field_of_the_configuration_is_misspelt(objects: Objects) -> None:
    in_serve_config(objects, "chunk_tokens:", "chunk_token:")


@mutation
def a_deployment_is_misspelt(objects: Objects) -> None:
    in_serve_config(objects, r"- name: router$", "- name: routers")


@mutation
def serve_listens_to_its_own_pod_alone(objects: Objects) -> None:
    in_serve_config(objects, r"host: 0\.0\.0\.0", "host: 127.0.0.1")


@mutation
def no_group_offers_a_role(objects: Objects) -> None:
    engines(objects)["resources"] = {"manta_nothing": "1000"}


@mutation
def a_deployment_has_more_replicas_than_pods_hold(objects: Objects) -> None:
    in_serve_config(objects, r"^( +- name: router\n +num_replicas: )\d+", r"\g<1>99")


@mutation
def a_key_stands_in_the_manifest(objects: Objects) -> None:
    in_serve_config(objects, "env:MANTA_ADMIN_KEY", "s3cret")


# Operation.


@mutation
def replicas_may_run_on_the_head(objects: Objects) -> None:
    del head(objects)["rayStartParams"]["num-cpus"]


@mutation
def a_pod_restarts_its_containers_under_autoscaler_v2(objects: Objects) -> None:
    pod(engines(objects))["restartPolicy"] = "Always"


@mutation
def pods_end_before_their_requests(objects: Objects) -> None:
    pod(routers(objects))["terminationGracePeriodSeconds"] = 30


@mutation
def the_old_cluster_ends_before_its_requests(objects: Objects) -> None:
    spec_of(objects)["rayClusterDeletionDelaySeconds"] = 60


@mutation
def a_pod_does_not_wait_before_it_ends(objects: Objects) -> None:
    del container(engines(objects))["lifecycle"]


@mutation
def a_secret_is_misspelt(objects: Objects) -> None:
    ray(objects)["authOptions"]["secretName"] = "manta-ray-tokens"


@mutation
def a_variable_of_a_secret_is_missing(objects: Objects) -> None:
    env = container(routers(objects))["env"]
    env[:] = [variable for variable in env if variable["name"] != "MANTA_API_KEY"]


@mutation
def a_disruption_budget_selects_nothing(objects: Objects) -> None:
    labels = of_kind(objects, "PodDisruptionBudget", "router")["spec"]["selector"]["matchLabels"]
    labels["app.kubernetes.io/component"] = "routers"


@mutation
def a_policy_closes_the_control_service(objects: Objects) -> None:
    for policy in (item for item in objects if item["kind"] == "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            for port in rule.get("ports", []):
                if port.get("port") == 6379:
                    port["port"] = 6378


@mutation
def a_monitor_asks_a_port_by_a_wrong_name(objects: Objects) -> None:
    of_kind(objects, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"] = "metric"


@mutation
def pods_are_spread_by_a_label_that_they_do_not_have(objects: Objects) -> None:
    constraint = pod(routers(objects))["topologySpreadConstraints"][0]
    constraint["labelSelector"] = {"matchLabels": {"app": "router"}}


# Security.


@mutation
def a_container_may_run_as_root(objects: Objects) -> None:
    del pod(engines(objects))["securityContext"]["runAsNonRoot"]


@mutation
def a_container_keeps_its_capabilities(objects: Objects) -> None:
    del container(engines(objects))["securityContext"]["capabilities"]


@mutation
def a_worker_has_a_token_of_its_account(objects: Objects) -> None:
    pod(engines(objects))["automountServiceAccountToken"] = True


@mutation
def ray_lets_everybody_in(objects: Objects) -> None:
    ray(objects)["authOptions"] = {"mode": "disabled"}


@mutation
def an_object_is_in_another_namespace(objects: Objects) -> None:
    of_kind(objects, "NetworkPolicy")["metadata"]["namespace"] = "default"
