"""A Ray head that `manta up` starts: where it listens, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
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

SERVES = """
import ray, sys
from ray import serve
ray.init(address=sys.argv[1], namespace="test", log_to_driver=False)

@serve.deployment(ray_actor_options={"num_cpus": 0})
class Hello:
    async def __call__(self, request):
        return "hello"

serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
serve.run(Hello.bind())
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    monkeypatch.setenv("MANTA_STATE", str(tmp_path))
    port = ray_cluster.free_ports(1)[0]
    return ClusterConfig.parse(
        {
            "name": "test",
            "engine": {"kind": "sim"},
            "ray": {"port": port, "num_cpus": 1, "object_store_mib": 80},
        }
    )


@pytest.fixture
def started(config: ClusterConfig) -> Iterator[ClusterState]:
    cluster = ray_cluster.start(config, "test.yaml", "http://127.0.0.1:8000")
    yield cluster
    ray_cluster.stop(cluster)


def run_in(cluster: ClusterState, program: str, *arguments: str) -> list[str]:
    environment = ray_cluster.LOCAL_RAY | ray_cluster.SERVE | dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", program, cluster.ray_address, *arguments],
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
    assert Path(started.temp).stat().st_mode & 0o077 == 0, "others can reach the session's files"
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
    assert not Path(started.temp).exists()
    assert list((ray_cluster.logs_of(started) / "logs").glob("gcs_server*"))


def test_ray_and_serve_listen_on_the_loopback_address_only(started: ClusterState) -> None:
    assert started.head is not None
    port = ray_cluster.free_ports(1)[0]
    run_in(started, SERVES, str(port))
    assert len(list(Path(started.temp).glob("h/*/admin.sock"))) == 1, (
        "HAProxy's files are not the session's own"
    )
    listening = [
        (member.name(), connection.laddr)
        for member in processes.belonging_to(started.head, started.mark)
        for connection in member.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
        # The address of a replica's own gRPC server is fixed in Serve's code; a bare deployment can't move it.
        and not member.name().startswith("ray::ServeReplica")
    ]
    assert {"gcs_server", "raylet", "haproxy"} <= {name for name, _ in listening}
    assert port in {at.port for _, at in listening}
    assert [one for one in listening if one[1].ip.removeprefix("::ffff:") != "127.0.0.1"] == []


def test_what_a_killed_head_leaves_is_still_found_and_stopped(started: ClusterState) -> None:
    assert started.head is not None
    escaped = int(run_in(started, ESCAPES)[0])
    os.kill(started.head.pid, signal.SIGKILL)
    wait_until(lambda: not started.running)
    assert psutil.pid_exists(escaped)

    report = ray_cluster.stop(started)

    assert report.left == ()
    assert not psutil.pid_exists(escaped)


def test_a_start_that_fails_says_what_ray_said_and_leaves_nothing(
    config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_START_HOOK", "no_such_module.hook")
    with pytest.raises(ray_cluster.RayStartError, match=r"(?s)Ray ended with code 1.*no_such_module"):
        ray_cluster.start(config, "test.yaml", "http://127.0.0.1:8000")
    assert state.names() == []
