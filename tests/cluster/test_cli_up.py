"""`manta up`, `status` and `down` as a person types them, on simulated replicas."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from cluster.state import ClusterState
from tests.cluster.commands import Commands
from tests.cluster.deployed import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

LOCAL_SIM = Path(__file__).parents[2] / "cluster" / "configs" / "local-sim.yaml"
SMALL = {"name": "small", "engine": {"kind": "sim"}}


@pytest.fixture
def local_sim(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path / "state", tmp_path, yaml.safe_load(LOCAL_SIM.read_text()))
    yield commands
    commands.close()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Commands]:
    commands = Commands(tmp_path / "state", tmp_path, SMALL)
    yield commands
    commands.close()


def until_ready(commands: Commands, process: subprocess.Popen[str]) -> ClusterState:
    def ready() -> bool:
        assert process.poll() is None, process.communicate()
        try:
            return httpx.get(f"{commands.endpoint}/readyz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    wait_for("a ready cluster", ready, 180)

    def seen() -> ClusterState | None:
        """By `up` itself, which asks now and then; a stop before that would find it at work."""
        known = commands.known()
        return known if known is not None and known.ready else None

    return wait_for("up to see it", seen, 30)


def test_up_status_chat_down(local_sim: Commands) -> None:
    up = local_sim.run("up", str(local_sim.config), "--detach")
    assert up.returncode == 0, up.stderr
    assert f"ready at {local_sim.endpoint}" in up.stderr
    assert "2 of 2 replicas are up" in up.stderr

    def all_ready() -> dict[str, object] | None:
        status = local_sim.run("status", "--json")
        assert status.returncode == 0, status.stderr
        answer: dict[str, object] = json.loads(status.stdout)
        replicas = answer["replicas"]
        assert isinstance(replicas, list)
        return answer if [each["state"] for each in replicas] == ["ready"] * 8 else None

    answer = wait_for("eight ready replicas", all_ready)
    assert answer["ready"] is True
    assert answer["endpoint"] == local_sim.endpoint
    assert [router["state"] for router in answer["routers"]] == ["RUNNING"]
    wanted = {"id", "role", "node", "address", "state", "waiting", "running", "kv_used"}
    for replica in answer["replicas"]:
        assert wanted <= set(replica)
        assert replica["role"] == "unified"
        assert replica["address"].startswith("127.0.0.1:")

    chat = {"model": "sim", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    said = httpx.post(f"{local_sim.endpoint}/v1/chat/completions", json=chat, timeout=60)
    assert said.status_code == 200
    assert said.json()["choices"][0]["message"]["content"]
    assert said.headers["x-manta-replica"] in [replica["id"] for replica in answer["replicas"]]

    second = local_sim.run("up", str(local_sim.config))
    assert second.returncode == 1
    assert f"manta runs already at {local_sim.endpoint}, started from {local_sim.config}" in second.stderr

    down = local_sim.run("down")
    assert down.returncode == 0, down.stderr
    assert "manta is down" in down.stdout
    assert local_sim.left() == []
    assert local_sim.run("status").returncode == 3
    assert local_sim.run("status", "--json").returncode == 3


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_foreground_cluster_that_is_told_to_end_leaves_nothing(
    small: Commands, ending: signal.Signals
) -> None:
    up = small.start("up", str(small.config))
    cluster = until_ready(small, up)
    up.send_signal(ending)
    ended = small.ended(up)
    assert ended.returncode == 130, ended.stderr
    assert "small is down" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert small.left() == []
    assert not Path(cluster.temp).exists()
    assert (small.state / "ray-small" / "logs").is_dir()
    assert list(small.state.glob("*.json")) == []


@pytest.mark.parametrize("process", ["", "raylet", "ray::ServeController", "ray::ServeReplica"])
def test_ctrl_c_while_starting_leaves_nothing_however_often_it_is_pressed(
    small: Commands, process: str
) -> None:
    """Pressed as soon as a process so named is there."""
    up = small.start("up", str(small.config))
    wait_for("a head", small.known)
    wait_for(process, lambda: any(name.startswith(process) for name in small.left()))
    up.send_signal(signal.SIGINT)

    def stopping() -> bool:
        known = small.known()
        return up.poll() is not None or (known is not None and known.stopping)

    wait_for("a stop", stopping)
    up.send_signal(signal.SIGINT)
    ended = small.ended(up)
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert small.left() == []
    assert list(small.state.glob("*.json")) == []


def test_down_from_elsewhere_ends_a_foreground_cluster_in_order(small: Commands) -> None:
    up = small.start("up", str(small.config))
    until_ready(small, up)
    down = small.run("down")
    assert down.returncode == 0, down.stderr
    ended = small.ended(up)
    assert ended.returncode == 0, ended.stderr
    assert "by itself" not in ended.stderr
    assert small.left() == []


def test_a_port_that_is_taken_is_named_before_anything_starts(small: Commands) -> None:
    up = small.start("up", str(small.config))
    until_ready(small, up)
    other = Commands(small.state, small.config.parent, SMALL | {"name": "other"})
    text = small.config.read_text().replace("name: small", "name: other")
    other.config.write_text(text)
    refused = other.run("up", str(other.config))
    assert refused.returncode == 1
    assert f"port {small.endpoint.rsplit(':', 1)[1]}" in refused.stderr
    assert "set http.port" in refused.stderr
    assert other.known() is None
    up.send_signal(signal.SIGINT)
    assert small.ended(up).returncode == 130
