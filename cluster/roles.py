"""Which node may run what: a node says so by Ray resources of its own, of which routers and replicas ask for a little.

A resource that no node has would leave what asks for it waiting without a word, so it is looked for before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cluster.config import ClusterConfig, ConfigError
from workers.placement import Placement

SHARE = 0.001
"""Of the resource, to each: a thousand find room on a node that offers one."""
ROUTER = "manta_router"
HEAD = "node:__internal_head__"
"""Resource by which Ray marks the head's node."""
_POLL_S = 0.5


class Node(NamedTuple):
    """A live node of a Ray cluster."""

    address: str
    resources: frozenset[str]

    @property
    def is_head(self) -> bool:
        return HEAD in self.resources


def role_resource(role: str) -> str:
    """Name of the resource that a node for replicas of this role has."""
    return f"manta_{role}"


def role_resources(config: ClusterConfig) -> tuple[str, ...]:
    """What the nodes must offer between them; nothing without `placement.use_roles`."""
    if not config.placement.use_roles:
        return ()
    return (ROUTER, *(role_resource(pool.role) for pool in config.pools))


def on_role_nodes(placement: Placement, role: str) -> Placement:
    """The same, on nodes for this role only; of a replica that spans nodes, every part."""
    share = {role_resource(role): SHARE}
    options = placement.ray_actor_options
    bundles = placement.placement_group_bundles
    return placement._replace(
        ray_actor_options=options | {"resources": options.get("resources", {}) | share},
        placement_group_bundles=None if bundles is None else [bundle | share for bundle in bundles],
    )


def missing(config: ClusterConfig, nodes: Sequence[Node]) -> list[str]:
    """Resources that no node offers."""
    offered = {name for node in nodes for name in node.resources}
    return [name for name in role_resources(config) if name not in offered]


def wait_for_nodes(
    config: ClusterConfig,
    nodes: Callable[[], Sequence[Node]],
    on_missing: Callable[[list[str]], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once every resource is offered. Raises ConfigError after `placement.nodes_timeout_s`."""
    limit = config.placement.nodes_timeout_s
    if limit is None or not role_resources(config):
        return
    end = clock() + limit
    while absent := missing(config, known := nodes()):
        if clock() >= end:
            raise ConfigError(explain(absent, known, f"after {limit:g} s "))
        on_missing(absent)
        sleep(_POLL_S)


def explain(absent: Sequence[str], nodes: Sequence[Node], when: str = "") -> str:
    """What a person should do about resources that no node offers."""
    there = ", ".join(
        f"{node.address} ({', '.join(sorted(r for r in node.resources if r.startswith('manta_'))) or 'none'})"
        for node in nodes
    )
    wanted = ", ".join(f'"{name}": 1' for name in absent)
    return (
        f"placement.use_roles is true, and {when}no node offers {', '.join(absent)}; there are {there or 'no nodes'}. "
        f"Needed: `ray start --resources='{{{wanted}}}'` on nodes for it, or placement.use_roles: false"
    )


def ray_nodes() -> list[Node]:
    """Of the Ray cluster that this process is connected to."""
    import ray

    return [
        Node(node["NodeManagerAddress"], frozenset(node["Resources"]))
        for node in ray.nodes()
        if node["Alive"]
    ]
