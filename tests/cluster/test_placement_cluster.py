"""Roles of nodes on a real Ray of four nodes, which share this machine's address."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster import ray_cluster
from cluster.config import ClusterConfig
from cluster.processes import MARK
from cluster.state import ClusterState
from tests.cluster.conftest import FAST_SIM
from tests.cluster.deployed import merged, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NODES = ("manta_router", "manta_unified", "manta_unified")

NODE = """
import signal, sys
from ray._private.node import Node
from ray._private.parameter import RayParams

address, role = sys.argv[1:]
parameters = RayParams(
    gcs_address=address, redis_address=address, node_ip_address="127.0.0.1", resources={role: 1}, num_cpus=0,
    num_gpus=0, object_store_memory=80 << 20, min_worker_port=0, max_worker_port=0, node_manager_port=0,
    include_log_monitor=False,
)
Node(parameters, head=False, shutdown_at_exit=True, spawn_reaper=False)
print("joined", flush=True)
signal.pause()
"""
"""Joins a Ray. `ray start` would, on loopback, only with settings that make the head listen everywhere."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    http, ray = ray_cluster.free_ports(2)
    patch = pytest.MonkeyPatch()
    patch.setenv("MANTA_STATE", str(tmp_path_factory.mktemp("state")))
    yield {
        "name": "placed",
        "engine": {"kind": "sim", "sim": FAST_SIM},
        "pools": [{"replicas": 2, "drain_timeout_s": 5}],
        # One address for all nodes has room for one proxy.
        "http": {"port": http, "proxy_location": "HeadOnly"},
        "placement": {"use_roles": True, "max_replicas_per_node": 1, "nodes_timeout_s": 30},
        "ray": {"port": ray, "num_cpus": 0, "object_store_mib": 80},
    }
    patch.undo()


@pytest.fixture(scope="module")
def head(config: dict[str, Any]) -> Iterator[ClusterState]:
    """Ray with a head for the head's work alone, and a node for routers and two for replicas."""
    bare = ClusterConfig.parse(merged(config, {"name": "head", "placement": {"use_roles": False}}))
    started = ray_cluster.start(bare, "head.yaml", bare.endpoint)
    nodes: list[subprocess.Popen[str]] = []
    try:
        for role in NODES:
            nodes.append(join(started, role))
        yield started
    finally:
        assert not ray_cluster.stop(started).left
        for node in nodes:
            node.communicate(timeout=30)


def join(head: ClusterState, role: str) -> subprocess.Popen[str]:
    """A node of the head's Ray; it ends with the head, whose mark it carries.

    One after the other: two that start at once take the same names for their files.
    """
    node = subprocess.Popen(
        [sys.executable, "-c", NODE, head.ray_address, role],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True, env=environment(serve=True) | {MARK: head.mark},
    )  # fmt: skip
    assert node.stdout is not None
    assert node.stdout.readline() == "joined\n"
    return node


def environment(serve: bool) -> dict[str, str]:
    known = ray_cluster.LOCAL_RAY | ray_cluster.SERVE | dict(os.environ)
    for name in ("RAY_ADDRESS", *ray_cluster.DRIVER):
        known.pop(name, None)
    return known if serve else known | ray_cluster.DRIVER


def manta(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster.cli", *arguments],
        env=environment(serve=False), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def written(config: dict[str, Any], folder: Path) -> str:
    file = folder / f"{config['name']}.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def endpoint(config: dict[str, Any], head: ClusterState, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = written(config, tmp_path_factory.mktemp("placed"))
    up = manta("up", file, "--address", head.ray_address)
    assert up.returncode == 0, up.stderr
    return str(ClusterConfig.parse(config).endpoint)


def admin(endpoint: str) -> dict[str, Any]:
    return httpx.get(f"{endpoint}/admin/replicas", timeout=30).json()  # type: ignore[no-any-return]


def test_check_says_which_nodes_have_a_role(
    config: dict[str, Any], head: ClusterState, tmp_path: Path
) -> None:
    file = written(config, tmp_path)
    found = wait_for("the nodes", lambda: joined(manta("check", file, "--address", head.ray_address)), 120)
    assert found.returncode == 0
    assert "manta_unified" in found.stdout


def joined(check: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str] | None:
    return check if check.returncode == 0 and check.stdout.count(ray_cluster.HOST) == len(NODES) else None


def nodes_with(head: ClusterState, resource: str) -> set[str]:
    """Ids of the nodes that have it."""
    program = (
        "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR'); "
        "print(*(node['NodeID'] for node in ray.nodes() if sys.argv[2] in node['Resources']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, head.ray_address, resource],
        env=environment(serve=False), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


def test_routers_and_replicas_are_on_nodes_of_their_roles_and_none_on_the_head(
    endpoint: str, head: ClusterState
) -> None:
    known = wait_for("both replicas", lambda: a if len((a := admin(endpoint))["replicas"]) == 2 else None, 60)
    routers = {router["node"] for router in known["routers"]}
    replicas = {replica["node"] for replica in known["replicas"]}
    assert routers == nodes_with(head, "manta_router")
    assert replicas == nodes_with(head, "manta_unified"), (
        "one on each, as placement.max_replicas_per_node says"
    )
    assert not (routers | replicas) & nodes_with(head, "node:__internal_head__")


def test_a_node_drains_and_the_other_serves(endpoint: str) -> None:
    wait_for("both replicas", lambda: [r["state"] for r in admin(endpoint)["replicas"]] == ["ready"] * 2, 60)
    victim, other = admin(endpoint)["replicas"]
    done = manta("drain", victim["node"], "--endpoint", endpoint)
    assert done.returncode == 0, done.stderr
    assert "Ray can be stopped there" in done.stdout
    answered = set()
    for number in range(6):
        body = {"model": "sim", "prompt": [number] * 100, "max_tokens": 2}
        answer = httpx.post(f"{endpoint}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200
        answered.add(answer.headers["x-manta-replica"])
    assert answered == {other["id"]}
    assert manta("drain", victim["node"], "--undo", "--endpoint", endpoint).returncode == 0


def test_a_role_that_no_node_has_is_an_error_and_not_a_wait(
    config: dict[str, Any], head: ClusterState, endpoint: str, tmp_path: Path
) -> None:
    changes = {
        "name": "split",
        "pools": [{"role": "decode"}],
        "http": {"route_prefix": "/split"},
        "placement": {"nodes_timeout_s": 1},
    }
    file = written(merged(config, changes), tmp_path)
    for command in ("check", "up"):
        refused = manta(command, file, "--address", head.ray_address)
        assert refused.returncode == 1
        assert "no node offers manta_decode" in refused.stdout + refused.stderr
        assert """ray start --resources='{"manta_decode": 1}'""" in refused.stdout + refused.stderr
    assert admin(endpoint)["ready"] is True
