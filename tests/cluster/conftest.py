"""One Ray for the whole session; every module deploys its own application on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import ray_cluster
from cluster.config import ClusterConfig
from cluster.models import fetch_model
from cluster.state import ClusterState
from tests.cluster.deployed import Deployed, merged
from tests.tiny_model import make_tiny_model

FAST_SIM = {
    "prefill_tokens_per_s": 100_000,
    "prefill_overhead_s": 0.001,
    "decode_tokens_per_s": 500,
    "blocks": 4096,
    "virtual_replicas": 1,
}

CPU_ENGINE = {
    "kind": "vllm",
    "device": "cpu",
    "args": {
        "dtype": "float32",
        "block-size": 32,
        "kv-cache-memory-bytes": 64 * 1024 * 1024,
        "enforce-eager": True,
        "distributed-executor-backend": "uni",
    },
    "env": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    },
}
"""float32, in which answers are compared token for token."""


@pytest.fixture(scope="session")
def http_port() -> int:
    return ray_cluster.free_ports(1)[0]


@pytest.fixture(scope="session")
def ray_head(http_port: int) -> Iterator[ClusterState]:
    import ray

    config = ClusterConfig.parse(
        {
            "name": "tests",
            "engine": {"kind": "sim"},
            "ray": {"port": ray_cluster.free_ports(1)[0], "object_store_mib": 120},
        }
    )
    # What the tests' S3 server needs of its clients; actors have their environment from here.
    os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")
    head = ray_cluster.start(config, "tests.yaml", f"http://127.0.0.1:{http_port}")
    try:
        ray.init(address=head.ray_address, namespace="manta", log_to_driver=False, logging_level="ERROR")
        yield head
        ray.shutdown()
    finally:
        report = ray_cluster.stop(head)
        assert not report.left


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model") / "tiny")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Fetched and converted once per machine."""
    return fetch_model("SmolLM2-135M-Instruct", lambda step, done: None)


@pytest.fixture(scope="module")
def deploy(ray_head: ClusterState, http_port: int) -> Iterator[Callable[..., Deployed]]:
    """Deploy an application made of maps of sections, later ones over earlier ones. One application at a time."""
    current: list[Deployed] = []

    def make(*layers: dict[str, Any]) -> Deployed:
        while current:
            current.pop().delete()
        sections: dict[str, Any] = {"http": {"port": http_port}}
        for layer in layers:
            sections = merged(sections, layer)
        deployed = Deployed(ClusterConfig.parse(sections))
        current.append(deployed)
        return deployed

    yield make
    while current:
        current.pop().delete()


@pytest.fixture(scope="module")
def deploy_sim(deploy: Callable[..., Deployed]) -> Callable[..., Deployed]:
    """Deploy simulated replicas; sections given override the fast defaults."""
    base = {
        "engine": {"kind": "sim", "sim": FAST_SIM},
        "cache": {"chunk_tokens": 64},
        "pools": [{"role": "unified", "replicas": 2, "drain_timeout_s": 30}],
    }
    return lambda **sections: deploy(base, sections)


@pytest.fixture(scope="module")
def deploy_vllm(deploy: Callable[..., Deployed], tiny_model: Path) -> Callable[..., Deployed]:
    """Deploy vLLM replicas with a core each; sections given override the tiny model and a small context."""
    base = {
        "model": {"path": str(tiny_model), "name": "tiny"},
        "engine": merged(CPU_ENGINE, {"args": {"max-model-len": 2048}}),
        "cache": {"chunk_tokens": 64},
        "pools": [{"role": "unified", "replicas": 2, "drain_timeout_s": 10, "resources": {"cores": 1}}],
    }
    return lambda **sections: deploy(base, sections)
