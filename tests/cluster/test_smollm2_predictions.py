"""Predicted beside measured seconds on real engines, at a load at which requests wait for each other."""

from __future__ import annotations

import io
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from router import decision_log
from tests.cluster.conftest import CPU_ENGINE
from tests.cluster.deployed import Deployed, merged

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

MODEL = "SmolLM2-135M-Instruct"
REQUESTS = 120
FIRST_FEW = 12
"""Requests that teach the router how fast the engines are."""


@pytest.fixture(scope="module")
def cluster(deploy: Callable[..., Deployed], smollm2: Path) -> Deployed:
    args = {"max-model-len": 2048, "kv-cache-memory-bytes": 256 * 1024 * 1024}
    cluster = deploy(
        {
            "model": {"path": str(smollm2), "name": MODEL},
            "engine": merged(CPU_ENGINE, {"args": args}),
            "cache": {"chunk_tokens": 64},
            "pools": [{"role": "unified", "replicas": 2, "drain_timeout_s": 10, "resources": {"cores": 1}}],
        }
    )
    cluster.ready_replicas(2)
    return cluster


def ask(cluster: Deployed, text: str, tokens: int) -> None:
    body = {"model": MODEL, "prompt": text, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{cluster.endpoint}/v1/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200
        for _ in answer.iter_bytes():
            pass


def test_predicted_and_measured_seconds_agree_on_real_engines(cluster: Deployed) -> None:
    draw = random.Random(3)
    topics = [f"Topic {number}: " + "what is known of it " * draw.randrange(20, 150) for number in range(12)]
    with ThreadPoolExecutor(32) as pool:
        asked = []
        for _ in range(REQUESTS):
            text = draw.choice(topics) + " ".join(str(draw.random()) for _ in range(draw.randrange(2, 40)))
            asked.append(pool.submit(ask, cluster, text, draw.randrange(1, 24)))
            time.sleep(draw.expovariate(1.2))
        for each in asked:
            each.result()
    cluster.wait_idle()
    log = decision_log.load(io.BytesIO(cluster.decisions()))[-REQUESTS:]
    found = []
    for decision in log[FIRST_FEW:]:
        assert decision.choice is not None
        assert decision.choice.predicted is not None
        assert decision.measured is not None
        measured = decision.measured.served_s
        assert measured is not None
        found.append(abs(decision.choice.predicted.ttft_s - measured) / measured)
    print(f"relative error: median {statistics.median(found):.2f}, p90 {np.quantile(found, 0.9):.2f}")
    assert statistics.median(found) <= 0.25
    assert np.quantile(found, 0.9) <= 0.60
