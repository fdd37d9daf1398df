"""A prefill pool on real Ray Serve: prompts in halves, and a pool that comes and goes while traffic runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from router.headers import parse_cached
from tests.cluster.deployed import Deployed, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

LONG = "words of a long prompt " * 100


def pools(prefill: int, decode: int = 1, **options: Any) -> list[dict[str, Any]]:
    return [
        {"role": "prefill", "replicas": prefill, "drain_timeout_s": 30, **options},
        {"role": "decode", "replicas": decode, "drain_timeout_s": 30, **options},
    ]


def ask(cluster: Deployed, text: str, model: str = "sim") -> httpx.Response:
    body = {"model": model, "prompt": text, "max_tokens": 8, "temperature": 0}
    return httpx.post(f"{cluster.endpoint}/v1/completions", json=body, timeout=60)


@pytest.fixture(scope="module")
def cluster(deploy_sim: Callable[..., Deployed]) -> Deployed:
    cluster = deploy_sim(pools=pools(1), router={"prefill": {"when": "always"}})
    cluster.ready_replicas(2)
    return cluster


def test_one_pool_computes_and_the_other_answers(cluster: Deployed) -> None:
    answer = ask(cluster, LONG)
    assert answer.status_code == 200
    assert answer.headers["x-manta-prefill"].startswith("prefill-")
    assert answer.headers["x-manta-replica"].startswith("decode-")
    assert parse_cached(answer.headers["x-manta-cached"])["computed"] == 1
    assert {replica["transfer"] for replica in cluster.replicas()} == {"sim"}


def test_when_to_is_changed_live(cluster: Deployed) -> None:
    pids = cluster.pids("prefill") | cluster.pids("decode")
    cluster.redeploy(router={"prefill": {"when": "never"}})
    wait_for("the new rule", lambda: ask(cluster, LONG).headers["x-manta-prefill"] == "local")
    cluster.redeploy(router={"prefill": {"when": "always"}})
    wait_for("the old rule", lambda: ask(cluster, LONG).headers["x-manta-prefill"] != "local")
    assert cluster.pids("prefill") | cluster.pids("decode") == pids


def test_the_prefill_pool_goes_to_zero_and_back_while_traffic_runs(cluster: Deployed) -> None:
    stop, answers = threading.Event(), list[httpx.Response]()

    def traffic(client: int) -> None:
        number = 0
        while not stop.is_set():
            answers.append(ask(cluster, f"{client} {number} {LONG}"))
            number += 1

    def asked(start: str) -> None:
        wait_for(f"answers by {start}", lambda: answers[-1].headers["x-manta-prefill"].startswith(start), 60)

    scaling = {
        "min_replicas": 0, "max_replicas": 1, "upscale_delay_s": 0.2, "downscale_delay_s": 0.5, "look_back_s": 1.0,
    }  # fmt: skip
    prefill, decode = pools(1)
    with ThreadPoolExecutor() as threads:
        running = [threads.submit(traffic, client) for client in range(3)]
        try:
            # Nobody asks it for anything, so that it goes.
            idle = {"prefill": {"when": "never", "soft_roles": False}}
            cluster.redeploy(pools=[prefill | {"autoscaling": scaling}, decode], router=idle)
            cluster.ready_replicas(1)
            asked("local")
            # Asked for, it comes again; meanwhile prompts are computed where they are answered.
            cluster.redeploy(router={"prefill": {"when": "always", "soft_roles": True}})
            cluster.ready_replicas(2)
            asked("prefill-")
        finally:
            stop.set()
        for each in running:
            each.result()
    assert {answer.status_code for answer in answers} == {200}


@pytest.mark.engine
@pytest.mark.long
def test_real_engines_hand_over_between_serve_replicas(deploy_vllm: Callable[..., Deployed]) -> None:
    cluster = deploy_vllm(
        pools=pools(1, resources={"cores": 1}),
        cache={"share": "on"},
        transfer={"kind": "nixl"},
        router={"prefill": {"when": "always"}},
    )
    cluster.ready_replicas(2)
    for number in range(3):
        answer = ask(cluster, f"{number} {LONG[:600]}", "tiny")
        assert answer.status_code == 200
        assert answer.headers["x-manta-prefill"].startswith("prefill-")
        tokens = parse_cached(answer.headers["x-manta-cached"])
        assert tokens["computed"] <= 32
        assert tokens["nixl"] > 32
    assert {replica["transfer"] for replica in cluster.replicas()} == {"nixl"}
