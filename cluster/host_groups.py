"""Which hosts a configuration needs: routers, and a group of hosts for every pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from cluster.config import ClusterConfig
from workers.config import PoolConfig
from workers.placement import place

ROUTER_ROLE = "router"


class Machine(NamedTuple):
    """What one host offers."""

    cpus: int
    gpus: int


@dataclass(frozen=True)
class Group:
    """Hosts of one kind that take replicas of one role."""

    role: str
    least: int
    most: int
    gpus: int
    """GPUs of one replica; 0 for a role that needs none."""
    cores: int


def groups(config: ClusterConfig, machine_for: Callable[[int], Machine]) -> list[Group]:
    """Routers, and a group per pool. `machine_for(gpus)` gives the Machine for replicas of so many GPUs."""
    found = [Group(ROUTER_ROLE, config.router.replicas, config.router.replicas, 0, 1)]
    for pool in config.pools:
        gpus = gpus_of(config, pool)
        cores = max(1, pool.resources.cores)
        scaling = pool.autoscaling
        least, most = (
            (scaling.min_replicas, scaling.max_replicas) if scaling else (pool.replicas, pool.replicas)
        )
        machine = machine_for(gpus)
        least, most = (_hosts(count, gpus, cores, machine) for count in (least, most))
        found.append(Group(pool.role, least, most, gpus, cores))
    return found


def gpus_of(config: ClusterConfig, pool: PoolConfig) -> int:
    """GPUs of one replica, over all of the hosts that it spans."""
    placement = place(config.engine_of(pool), pool, "cuda" if config.engine.device == "cuda" else "cpu")
    bundles = placement.placement_group_bundles or []
    return int(
        placement.ray_actor_options.get("num_gpus", 0) + sum(bundle.get("GPU", 0) for bundle in bundles)
    )


def lock_of(config: ClusterConfig) -> str:
    """The lock that all hosts install: a router renders with the engine's own package, so it needs the same one."""
    return "gpu" if config.engine.kind == "vllm" and config.engine.device == "cuda" else "cpu"


def _hosts(replicas: int, gpus: int, cores: int, machine: Machine) -> int:
    if gpus > machine.gpus:
        return replicas * ceil(gpus / machine.gpus)
    fit = machine.gpus // gpus if gpus else max(1, machine.cpus // cores)
    return ceil(replicas / fit)
