"""A pod template changed to what a configuration needs: sizes, the disk tier, keys, the model."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from pathlib import PurePosixPath
from typing import Any

from cluster.config import ClusterConfig
from cluster.export import ExportError
from cluster.host_groups import gpus_of
from cluster.k8s.kustomize import Object
from cluster.k8s.quantity import MIB, parse, text
from cluster.k8s.resource_checks import GPU, SHM, limit, volume_size
from cluster.k8s.serve_config import Served, keys_of
from cluster.k8s.workloads import Workload, items, workloads
from cluster.secret import VARIABLE
from workers.config import PoolConfig

DISK_SHARE = Fraction(11, 10)
"""Of cache.disk.mib, to its volume: the file system takes some, and files that are being written."""
STORAGE = "ephemeral-storage"
MODEL_NAMES = ("manta-model",)
"""Objects that fetch a model of the hub: a Job, and the policy that lets it out."""
WAITING = "wait-for-model"
"""Init container that waits for what the Job fetches."""


def fit_sizes(pod: Workload, config: ClusterConfig, pool: PoolConfig) -> None:
    """GPUs, CPUs, memory and object store of a pod with one replica, or its part of one that spans nodes.

    What the pod has for itself, beside /dev/shm, is taken as meant for one GPU.
    """
    gpus = gpus_of(config, pool)
    per_pod = min(gpus, pool.resources.gpus_per_node)
    shm = pod.volume(pod.mount_of(SHM).get("name"))["emptyDir"]
    before, store = parse(shm["sizeLimit"]), int(pod.params["object-store-memory"])
    own, times = limit(pod.main, "memory") - before, max(1, per_pod)
    if "object_store_mib" in config.ray.model_fields_set:
        pod.params["object-store-memory"] = str(config.ray.object_store_mib * MIB)
        shm["sizeLimit"] = text(int(before) - store + config.ray.object_store_mib * MIB)
    cores = limit(pod.main, "cpu") * times
    if not gpus:
        # One is for Ray, the replica's own HTTP server and its cache.
        cores = max(cores, Fraction(pool.resources.cores + 1))
    sizes = {"cpu": _cores(cores), "memory": text(int(own * times + parse(shm["sizeLimit"])))}
    for resources in pod.main["resources"].values():
        resources |= sizes
        resources.pop(GPU, None)
        if per_pod:
            resources[GPU] = str(per_pod)
    if not gpus:
        pod.spec["tolerations"] = [
            item for item in items(pod.spec.get("tolerations")) if item.get("key") != GPU
        ]
        if not pod.spec["tolerations"]:
            del pod.spec["tolerations"]


def fit_disk(pod: Workload, before: ClusterConfig, config: ClusterConfig) -> None:
    """The volume of the disk tier: where the configuration wants it, as large as it needs, or gone."""
    there = pod.mount_of(before.cache.disk.path) if before.cache.disk.path else {}
    wanted = config.cache.disk.path if config.engine.kind == "vllm" and config.cache.share != "off" else ""
    if not there:
        if wanted:
            raise ExportError(
                f"cache.disk.path is {wanted}, and pods of the base have no volume for it; give another --base"
            )
        return
    volume = pod.volume(there["name"])
    size = ceil(config.cache.disk.mib * DISK_SHARE) * MIB if wanted else 0
    if "emptyDir" in volume:
        storage = limit(pod.main, STORAGE) - volume_size(volume) + size
        for resources in pod.main["resources"].values():
            resources[STORAGE] = text(int(storage))
    if not wanted:
        pod.spec["volumes"].remove(volume)
        pod.main["volumeMounts"].remove(there)
    elif "emptyDir" in volume:
        volume["emptyDir"]["sizeLimit"] = text(size)
    else:
        volume["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"] = text(size)
    if wanted and not wanted.startswith(there["mountPath"].rstrip("/") + "/"):
        there["mountPath"] = str(PurePosixPath(wanted).parent)


def fit_keys(router: Workload, before: Served, config: ClusterConfig) -> None:
    """Variables that routers look keys up in, from the Secret that holds the cluster's own."""
    variables = router.main["env"]
    secret = next(item for item in variables if item["name"] == VARIABLE)["valueFrom"]["secretKeyRef"]["name"]
    wanted = [key.removeprefix("env:") for key in keys_of(config)]
    unused = {key.removeprefix("env:") for key in keys_of(before.config, before.user_config)} - {*wanted}
    variables[:] = [item for item in variables if item["name"] not in unused]
    there = {item["name"] for item in variables}
    for name in dict.fromkeys(wanted):
        if name not in there:
            variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}})


def fit_model(objects: list[Object], config: ClusterConfig) -> list[Object]:
    """The Job that fetches the model, and what waits for it; without both for a folder that is there already."""
    path = config.model.path
    folders = [folder for folder in (path, *config.model.adapters.values()) if folder.startswith("/")]
    for pod in workloads(objects):
        for folder in folders if pod.group in {pool.role for pool in config.pools} else ():
            if "persistentVolumeClaim" not in pod.volume(pod.mount_of(folder).get("name")):
                raise ExportError(
                    f"{folder} is on no volume of the {pod.group} pods; needed: a folder where one is mounted"
                )
    if config.engine.kind == "sim":
        return objects
    if path.startswith("/"):
        for pod in workloads(objects):
            waiting = items(pod.spec.get("initContainers"))
            if pod.group and waiting:
                pod.spec["initContainers"] = [item for item in waiting if item["name"] != WAITING]
                if not pod.spec["initContainers"]:
                    del pod.spec["initContainers"]
        return [item for item in objects if item["metadata"]["name"] not in MODEL_NAMES]
    revision = str(config.engine.args.get("revision", "main"))
    for pod in workloads(objects):
        for container in pod.all_containers:
            _set(container, "MODEL", f"{path}@{revision}" if container["name"] == WAITING else path)
            _set(container, "REVISION", revision)
    return objects


def _set(container: dict[str, Any], name: str, value: str) -> None:
    for variable in items(container.get("env")):
        if variable["name"] == name:
            variable["value"] = value


def _cores(value: Fraction) -> str:
    return str(int(value)) if value.denominator == 1 else f"{int(value * 1000)}m"
