"""What the pods of a RayService must have for the application that serveConfigV2 deploys on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.k8s.quantity import MIB
from cluster.k8s.resource_checks import limit, object_store, volume_size
from cluster.k8s.serve_config import ROUTER_DEPLOYMENT, Served, keys_of, number
from cluster.k8s.workloads import HEAD, Finding, Workload, items, mapping
from cluster.secret import VARIABLE
from workers.placement import ranks

_OVERHEAD = 0.05
"""Of the disk tier: what its volume must have beside the chunks."""


def check_pod_serves(pod: Workload, served: Served) -> Iterator[Finding]:
    """Findings of one pod template of the service."""
    for message in (*_environment(pod, served), *(_worker(pod, served) if pod.group != HEAD else ())):
        yield Finding(pod.where, message)


def _environment(pod: Workload, served: Served) -> Iterator[str]:
    """Variables of Secrets: the cluster's secret everywhere, the keys of tenants where routers run."""
    variables = {variable.get("name"): variable for variable in items(pod.main.get("env"))}
    wholesale = any("secretRef" in source for source in items(pod.main.get("envFrom")))
    secret = variables.get(VARIABLE)
    if secret is None and not wholesale:
        yield f"its Ray container has no {VARIABLE}, which routers show to replicas"
    if secret is not None and "value" in secret:
        yield f"{VARIABLE} stands in the manifest; needed: valueFrom.secretKeyRef"
    for key in keys_of(served.config, served.user_config):
        if not str(key).startswith("env:"):
            yield "serveConfigV2 has a key of a tenant or of the admin in it; needed: env:NAME, and the key in a Secret"
        elif pod.group == ROUTER_DEPLOYMENT and not wholesale and str(key)[4:] not in variables:
            yield f"routers look up {str(key)[4:]}, which the pods do not have"


def _worker(pod: Workload, served: Served) -> Iterator[str]:
    grace = pod.spec.get("terminationGracePeriodSeconds", 30)
    if not isinstance(grace, int) or grace <= served.longest_s:
        yield (
            f"terminationGracePeriodSeconds is {grace}; needed: more than {served.longest_s:g}, the longest "
            "request that is waited for"
        )
    yield from _pre_stop(pod, served, grace)
    declared = pod.ports().values()
    if served.config.http.port not in declared:
        yield f"its containers declare no port {served.config.http.port}, at which Serve listens"
    if pod.group == ROUTER_DEPLOYMENT:
        return
    yield from _tiers(pod, served)
    engine = served.config.engine
    path = served.config.model.path
    if engine.kind == "vllm" and path.startswith("/"):
        mount = pod.mount_of(path)
        if not mount:
            yield f"model.path is {path}, and no volume is mounted there"
        elif mount.get("readOnly") is not True:
            yield f"the volume of {path} can be written to; needed: readOnly: true"


def _pre_stop(pod: Workload, served: Served, grace: Any) -> Iterator[str]:
    hook = mapping(mapping(pod.main.get("lifecycle")).get("preStop"))
    if not hook:
        yield "its Ray container has no preStop hook, so a pod that is deleted cuts its streams"
        return
    command = mapping(hook.get("exec")).get("command") or [mapping(hook.get("sleep")).get("seconds", "")]
    waits = number(command[-1] if isinstance(command, list) else "", 0)
    if not served.longest_s <= waits < number(grace, 0):
        yield (
            f"its preStop hook waits {waits:g} s; needed: between {served.longest_s:g}, the longest request, and "
            f"terminationGracePeriodSeconds, {grace}"
        )


def _tiers(pod: Workload, served: Served) -> Iterator[str]:
    cache, store = served.config.cache, object_store(pod)
    if store and cache.dram.mib * MIB > 0.9 * store:
        yield f"cache.dram.mib is {cache.dram.mib}; needed: at most 0.9 of the object store's {store // MIB}"
    shm = volume_size(pod.volume(pod.mount_of("/dev/shm").get("name")))
    staged = cache.staging_mib * MIB * ranks(served.config.engine) if cache.share != "off" else 0
    if (memory := limit(pod.main, "memory")) and memory < shm + staged:
        yield f"the limit of memory has no room for cache.staging_mib beside /dev/shm: {int(memory / MIB)} MiB"
    if cache.share == "off" or not cache.disk.path:
        return
    volume = pod.volume(pod.mount_of(cache.disk.path).get("name"))
    if not volume:
        yield f"cache.disk.path is {cache.disk.path}, and no volume is mounted there"
    elif "hostPath" in volume:
        return
    elif (size := volume_size(volume)) < cache.disk.mib * MIB * (1 + _OVERHEAD):
        yield (
            f"cache.disk.mib is {cache.disk.mib} and its volume has {int(size / MIB)} MiB; needed: "
            f"{int(cache.disk.mib * (1 + _OVERHEAD))} MiB"
        )
