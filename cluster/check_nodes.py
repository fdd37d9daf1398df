"""`manta check --address`: would a configuration find its places on the nodes of a Ray cluster that runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cluster.check import Finding
from cluster.config import ClusterConfig
from cluster.roles import Node, explain, missing, ray_nodes, role_resources


def check_nodes(config: ClusterConfig, nodes: Sequence[Node]) -> list[Finding]:
    """One finding for each role's resource, and one for a head that would run more than the head."""
    wanted = role_resources(config)
    if not wanted:
        return [Finding("ok", "placement", f"placement.use_roles is off: any of {len(nodes)} nodes will do")]
    absent = missing(config, nodes)
    findings = [
        Finding("error", name, explain([name], nodes))
        if name in absent
        else Finding("ok", name, f"offered by {', '.join(n.address for n in nodes if name in n.resources)}")
        for name in wanted
    ]
    for node in nodes:
        there = sorted(node.resources.intersection(wanted))
        if node.is_head and there and len(nodes) > 1:
            findings.append(
                Finding(
                    "warning",
                    "head",
                    f"{node.address} offers {', '.join(there)}; what runs there dies with Ray's head, and takes memory "
                    "from it",
                )
            )
    return findings


def nodes_of(address: str) -> list[Node]:
    """The nodes of the Ray at that address. Raises ConnectionError."""
    import ray

    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    try:
        return ray_nodes()
    finally:
        ray.shutdown()
