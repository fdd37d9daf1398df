"""One real engine on a GPU, served by the cluster. `make test-gpu`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.deployed import Deployed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ray,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no GPU here: nvidia-smi is not installed"),
]


@pytest.fixture(scope="module")
def cluster(deploy: Callable[..., Deployed], smollm2: Path) -> Deployed:
    args = {
        "dtype": "float32",
        "enforce-eager": True,
        "max-model-len": 4096,
        "block-size": 16,
        "gpu-memory-utilization": 0.2,
    }
    return deploy(
        {
            "model": {"path": str(smollm2), "name": "smollm2"},
            "engine": {"kind": "vllm", "device": "cuda", "args": args},
            "cache": {"chunk_tokens": 64},
            "pools": [{"role": "unified", "replicas": 1, "drain_timeout_s": 10}],
        }
    )


def test_a_repeated_prefix_is_a_hit_and_changes_no_token(cluster: Deployed) -> None:
    body: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Count the words of this: " + "one two three four " * 60}],
        "max_tokens": 24,
        "temperature": 0,
    }
    cold, warm = (cluster.http.post("/v1/chat/completions", json=body) for _ in range(2))
    assert (cold.status_code, warm.status_code) == (200, 200)
    cached = warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 192
    assert cold.headers["x-manta-cached"].startswith("hbm=0,")
    assert warm.headers["x-manta-cached"].startswith(f"hbm={cached},")
    assert warm.json()["choices"][0]["message"] == cold.json()["choices"][0]["message"]


def test_the_index_knows_what_the_gpu_holds(cluster: Deployed) -> None:
    (replica,) = cluster.ready_replicas(1)
    assert replica["chunks"] > 0
