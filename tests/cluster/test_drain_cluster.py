"""`manta drain` as a person types it, on replicas of real Ray Serve that have traffic."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.cluster.deployed import Deployed, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

CLIENTS = 6


@pytest.fixture(scope="module")
def cluster(deploy_sim: Callable[..., Deployed]) -> Deployed:
    """Three replicas, each a process, that take half a second for an answer of the traffic's."""
    pool = {"role": "unified", "replicas": 3, "drain_timeout_s": 30}
    cluster = deploy_sim(pools=[pool], engine={"sim": {"decode_tokens_per_s": 40, "virtual_replicas": 1}})
    cluster.ready_replicas(3)
    return cluster


def manta_drain(cluster: Deployed, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli", "drain", *arguments, "--endpoint", cluster.endpoint]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def states(cluster: Deployed) -> dict[str, str]:
    return {replica["id"]: replica["state"] for replica in cluster.replicas()}


class Traffic:
    """Streams one after the other from several clients, until it is stopped."""

    def __init__(self, cluster: Deployed) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self.answered_by: list[str] = []
        self.failures: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._cluster.endpoint, timeout=60) as http:
            while not self._stop.is_set():
                self._ask(http)

    def _ask(self, http: httpx.Client) -> None:
        text = f"{next(self._numbers)} asks"
        body = {
            "model": "sim",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 20,
            "stream": True,
        }
        try:
            answer = http.post("/v1/chat/completions", json=body)
            if answer.status_code == 200 and answer.content.endswith(b"data: [DONE]\n\n"):
                self.answered_by.append(answer.headers["x-manta-replica"])
            else:
                self.failures.append(f"{answer.status_code}: {answer.text[-200:]}")
        except httpx.HTTPError as error:
            self.failures.append(repr(error))

    def next(self, count: int) -> list[str]:
        """The replicas of so many answers whose requests began from here on."""
        begun = len(self.answered_by) + CLIENTS
        wait_for("more answers", lambda: len(self.answered_by) >= begun + count or self.failures)
        return self.answered_by[begun:]

    def stop(self) -> None:
        self._stop.set()


@contextmanager
def traffic(cluster: Deployed) -> Iterator[Traffic]:
    made = Traffic(cluster)
    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(made.run) for _ in range(CLIENTS)]
        try:
            yield made
        finally:
            made.stop()
        for client in clients:
            client.result()
    assert made.failures == []


def test_a_replica_drains_under_traffic_without_a_failed_request_and_comes_back(cluster: Deployed) -> None:
    victim = cluster.ready_replicas(3)[0]["id"]
    pids = cluster.pids("unified")
    with traffic(cluster) as flow:
        assert victim in flow.next(12)
        done = manta_drain(cluster, victim)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"drained: {victim}\n")
        assert states(cluster)[victim] == "draining"
        assert victim not in flow.next(12)
        (drained,) = [replica for replica in cluster.replicas() if replica["id"] == victim]
        assert drained["open_requests"] == drained["running"] == drained["waiting"] == 0
        back = manta_drain(cluster, victim, "--undo")
        assert (back.returncode, back.stdout.strip()) == (0, f"takes requests again: {victim}")
        cluster.ready_replicas(3)
        assert victim in flow.next(12)
    assert cluster.pids("unified") == pids, "the same processes all along"


def test_what_drains_goes_on_draining_under_another_router(cluster: Deployed) -> None:
    victim = cluster.ready_replicas(3)[0]["id"]
    assert manta_drain(cluster, victim).returncode == 0
    (old,) = cluster.pids("router").values()
    os.kill(old, signal.SIGKILL)
    wait_for("another router", lambda: old not in (cluster.pids("router") or {"": old}).values(), 60)

    def known() -> dict[str, str] | None:
        try:
            found = states(cluster)
        except (httpx.HTTPError, ValueError, KeyError):
            return None
        return found if sorted(found.values()) == ["draining", "ready", "ready"] else None

    assert wait_for("what the old one knew", known, 60)[victim] == "draining"
    assert manta_drain(cluster, victim, "--undo").returncode == 0
    cluster.ready_replicas(3)


def test_the_only_node_is_drained_by_force_alone(cluster: Deployed) -> None:
    node = cluster.ready_replicas(3)[0]["node"]
    refused = manta_drain(cluster, node[:8])
    assert refused.returncode == 1
    assert "No replica would be left" in refused.stderr
    assert set(states(cluster).values()) == {"ready"}
    assert manta_drain(cluster, node[:8], "--force").returncode == 0
    assert set(states(cluster).values()) == {"draining"}
    assert manta_drain(cluster, "127.0.0.1", "--undo").returncode == 0
    cluster.ready_replicas(3)


def test_a_name_of_nothing_is_refused_with_the_names_there_are(cluster: Deployed) -> None:
    refused = manta_drain(cluster, "unified-nobody")
    assert refused.returncode == 1
    assert all(replica["id"] in refused.stderr for replica in cluster.replicas())


def test_a_pool_that_shrinks_lets_what_is_open_end(cluster: Deployed) -> None:
    """What `manta drain` tells people to do for one replica less."""
    pool: dict[str, Any] = {"role": "unified", "replicas": 2, "drain_timeout_s": 30}
    with traffic(cluster) as flow:
        flow.next(6)
        cluster.redeploy(pools=[pool])
        cluster.ready_replicas(2)
        flow.next(6)
