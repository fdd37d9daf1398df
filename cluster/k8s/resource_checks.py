"""What a pod's sizes add up to: requests and limits, /dev/shm inside of memory, disks inside of ephemeral storage."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from cluster.k8s.quantity import GIB, MIB, QuantityError, parse
from cluster.k8s.workloads import Finding, Workload, items, mapping

GPU = "nvidia.com/gpu"
SHM = "/dev/shm"
RAY_RESERVE = GIB
"""Of a Ray pod's memory, for Ray's own processes beside its object store."""
_EQUAL = ("memory", GPU)
"""What may not be overcommitted: a node that runs out of it kills pods."""


def check_resources(pod: Workload) -> Iterator[Finding]:
    """Findings of one template."""
    for message in (*_requests(pod), *_memory(pod), *_storage(pod)):
        yield Finding(pod.where, message)


def limit(container: dict[str, Any], name: str) -> Fraction:
    """0 where there is none, or one that is no quantity."""
    return _size(mapping(mapping(container.get("resources")).get("limits")).get(name, 0))


def object_store(pod: Workload) -> int:
    """Bytes of Ray's object store as `rayStartParams` says; 0 where it does not."""
    given = str(pod.params.get("object-store-memory", ""))
    return int(given) if given.isdigit() else 0


def volume_size(volume: dict[str, Any]) -> Fraction:
    """Of an emptyDir, or of the claim that an ephemeral volume makes; 0 where it is not known."""
    if "emptyDir" in volume:
        return _size(mapping(volume["emptyDir"]).get("sizeLimit", 0))
    claim = mapping(mapping(mapping(volume.get("ephemeral")).get("volumeClaimTemplate")).get("spec"))
    return _size(mapping(mapping(claim.get("resources")).get("requests")).get("storage", 0))


def _size(value: Any) -> Fraction:
    try:
        return parse(value)
    except QuantityError:
        return Fraction(0)


def _requests(pod: Workload) -> Iterator[str]:
    for container in pod.all_containers:
        name = container.get("name")
        resources = mapping(container.get("resources"))
        limits, requests = mapping(resources.get("limits")), mapping(resources.get("requests"))
        for kind, given in (("limits", limits), ("requests", requests)):
            for resource, value in given.items():
                try:
                    parse(value)
                except QuantityError as error:
                    yield f"{name}: {kind}.{resource}: {error}"
        for resource in ("cpu", "memory"):
            if resource not in requests:
                yield f"{name} requests no {resource}"
        if "memory" not in limits:
            yield f"{name} has no limit of memory"
        for resource in limits.keys() & requests.keys():
            asked, most = _size(requests[resource]), _size(limits[resource])
            if asked > most:
                yield f"{name}: requests.{resource} is {requests[resource]}, more than its limit of {limits[resource]}"
            elif asked < most and resource in _EQUAL:
                yield (
                    f"{name}: requests.{resource} is {requests[resource]} and its limit {limits[resource]}; "
                    "needed: the same"
                )
        if GPU in requests and GPU not in limits:
            yield f"{name} requests {GPU} without a limit"


def _memory(pod: Workload) -> Iterator[str]:
    held: dict[str, Fraction] = {}
    for volume in pod.volumes:
        empty = mapping(volume.get("emptyDir"))
        if empty.get("medium") == "Memory":
            held[str(volume.get("name"))] = _size(empty.get("sizeLimit", 0))
    for container in pod.containers:
        mounted = [mount.get("name") for mount in items(container.get("volumeMounts"))]
        inside = sum((size for name, size in held.items() if name in mounted), Fraction(0))
        memory = limit(container, "memory")
        if inside and memory <= inside:
            yield (
                f"{container.get('name')}: its limit of memory, {_mib(memory)} MiB, must hold its volumes in memory, "
                f"{_mib(inside)} MiB, and itself"
            )
    if pod.group:
        yield from _shared_memory(pod)


def _shared_memory(pod: Workload) -> Iterator[str]:
    store = object_store(pod)
    if not store:
        found = pod.params.get("object-store-memory")
        yield f"rayStartParams.object-store-memory is {found!r}; needed: bytes, by which {SHM} is sized"
        return
    volume = pod.volume(pod.mount_of(SHM).get("name"))
    if mapping(volume.get("emptyDir")).get("medium") != "Memory":
        yield f"{SHM} is not an emptyDir of medium Memory: Ray would put its object store on a disk"
        return
    shm, memory = volume_size(volume), limit(pod.main, "memory")
    if shm < store:
        yield f"{SHM} has {_mib(shm)} MiB; needed: {_mib(store)} MiB, rayStartParams.object-store-memory, or more"
    if memory < shm + RAY_RESERVE:
        yield (
            f"the limit of memory is {_mib(memory)} MiB; needed: {_mib(shm)} MiB for {SHM} and "
            f"{_mib(RAY_RESERVE)} MiB for Ray at least"
        )


def _storage(pod: Workload) -> Iterator[str]:
    """An emptyDir on disk counts as ephemeral storage: over the limit the pod is evicted."""
    on_disk = [
        volume
        for volume in pod.volumes
        if "emptyDir" in volume and mapping(volume["emptyDir"]).get("medium", "") == ""
    ]
    needed = sum((volume_size(volume) for volume in on_disk), Fraction(0))
    given = sum((limit(container, "ephemeral-storage") for container in pod.containers), Fraction(0))
    if needed and given <= needed:
        yield (
            f"limits of ephemeral-storage are {_mib(given)} MiB; needed: more than the {_mib(needed)} MiB of "
            f"{', '.join(str(volume.get('name')) for volume in on_disk)}"
        )


def _mib(size: Fraction | int) -> int:
    return int(size / MIB)
