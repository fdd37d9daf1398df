"""One Ray for the whole session; every module deploys its own application on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster import ray_cluster
from cluster.config import ClusterConfig
from cluster.state import ClusterState
from tests.cluster.deployed import Deployed, merged

FAST_SIM = {
    "prefill_tokens_per_s": 100_000,
    "prefill_overhead_s": 0.001,
    "decode_tokens_per_s": 500,
    "blocks": 4096,
    "virtual_replicas": 1,
}


@pytest.fixture(scope="session")
def http_port() -> int:
    return ray_cluster.free_ports(1)[0]


@pytest.fixture(scope="session")
def ray_head(http_port: int) -> Iterator[ClusterState]:
    import ray

    config = ClusterConfig.parse(
        {"name": "tests", "engine": {"kind": "sim"}, "ray": {"port": ray_cluster.free_ports(1)[0], "object_store_mib": 120}}
    )
    head = ray_cluster.start(config, "tests.yaml", f"http://127.0.0.1:{http_port}")
    try:
        ray.init(address=head.ray_address, namespace="manta", log_to_driver=False, logging_level="ERROR")
        yield head
        ray.shutdown()
    finally:
        report = ray_cluster.stop(head)
        assert not report.left


@pytest.fixture(scope="module")
def deploy_sim(ray_head: ClusterState, http_port: int) -> Iterator[Callable[..., Deployed]]:
    """Deploy simulated replicas; sections given override the fast defaults. One application at a time."""
    current: list[Deployed] = []

    def make(**sections: Any) -> Deployed:
        while current:
            current.pop().delete()
        base = {
            "engine": {"kind": "sim", "sim": FAST_SIM},
            "cache": {"chunk_tokens": 64},
            "pools": [{"role": "unified", "replicas": 2, "drain_timeout_s": 30}],
            "http": {"port": http_port},
        }
        deployed = Deployed(ClusterConfig.parse(merged(base, sections)))
        current.append(deployed)
        return deployed

    yield make
    while current:
        current.pop().delete()
