"""A Ray head that `manta up` starts: where it listens, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cluster import processes, ray_cluster, state
from cluster.config import ClusterConfig
from cluster.state import ClusterState

pytestmark = pytest.mark.ray

ESCAPES = """
import ray, sys
ray.init(address=sys.argv[1], namespace="test", log_to_driver=False)

@ray.remote(num_cpus=0)
class Actor:
    def spawn(self):
        import subprocess
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

actor = Actor.options(name="actor", lifetime="detached").remote()
print(ray.get(actor.spawn.remote()), ray.nodes()[0]["NodeManagerAddress"])
"""
"""A detached actor whose child leaves the head's session."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    monkeypatch.setenv("MANTA_STATE", str(tmp_path))
    port = ray_cluster.free_ports(1)[0]
    return ClusterConfig.parse(
        {"name": "test", "engine": {"kind": "sim"}, "ray": {"port": port, "num_cpus": 1, "object_store_mib": 80}}
    )


@pytest.fixture
def started(config: ClusterConfig) -> Iterator[ClusterState]:
    cluster = ray_cluster.start(config, "test.yaml", "http://127.0.0.1:8000")
    yield cluster
    ray_cluster.stop(cluster)


def run_in(cluster: ClusterState, program: str) -> list[str]:
    environment = ray_cluster.LOCAL_RAY | dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", program, cluster.ray_address],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout.split()


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.02)


def test_a_stop_ends_every_process_and_forgets_the_cluster(started: ClusterState) -> None:
    assert started.head is not None
    escaped, address = run_in(started, ESCAPES)
    assert address == "127.0.0.1"
    members = processes.belonging_to(started.head, started.mark)
    assert {started.head.pid, int(escaped)} < {member.pid for member in members}
    assert state.find("test") == started

    report = ray_cluster.stop(started)

    assert report.left == ()
    assert report.stopped >= len(members)
    assert [member.pid for member in members if member.is_running()] == []
    assert processes.belonging_to(started.head, started.mark) == []
    assert state.find("test") is None
    assert not started.running


def test_everything_listens_on_the_loopback_address_only(started: ClusterState) -> None:
    assert started.head is not None
    run_in(started, ESCAPES)
    listening = {
        connection.laddr.ip.removeprefix("::ffff:")
        for member in processes.belonging_to(started.head, started.mark)
        for connection in member.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_what_a_killed_head_leaves_is_still_found_and_stopped(started: ClusterState) -> None:
    assert started.head is not None
    escaped = int(run_in(started, ESCAPES)[0])
    os.kill(started.head.pid, signal.SIGKILL)
    wait_until(lambda: not started.running)
    assert psutil.pid_exists(escaped)

    report = ray_cluster.stop(started)

    assert report.left == ()
    assert not psutil.pid_exists(escaped)


def test_a_start_that_fails_says_what_ray_said_and_leaves_nothing(config: ClusterConfig) -> None:
    with socket.create_server(("127.0.0.1", config.ray.port)):
        with pytest.raises(ray_cluster.RayStartError, match=f"(?s)Ray ended with code.*{config.ray.port}"):
            ray_cluster.start(config, "test.yaml", "http://127.0.0.1:8000")
    assert state.names() == []
