"""The configuration as arguments of Serve's own commands: one file for `serve run`, `serve deploy` and KubeRay."""

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
from ray import serve

from cluster.state import ClusterState
from tests.cluster.conftest import FAST_SIM
from tests.cluster.deployed import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def application(ray_head: ClusterState, http_port: int) -> Iterator[dict[str, Any]]:
    yield {
        "name": "by-file",
        "import_path": "cluster.app:build",
        "route_prefix": "/",
        "args": {
            "name": "by-file",
            "engine": {"kind": "sim", "sim": FAST_SIM},
            "pools": [{"role": "unified", "replicas": 1, "drain_timeout_s": 5}],
            "http": {"port": http_port},
        },
        "deployments": [{"name": "router", "user_config": {"limits": {"max_body_bytes": 100_000}}}],
    }
    serve.delete("by-file")


def run(application: dict[str, Any], head: ClusterState, port: int, folder: Path) -> None:
    file = folder / "serve.yaml"
    http = {"host": "127.0.0.1", "port": port}
    file.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking"]
    command += ["--address", head.ray_address, str(file)]
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_one_file_deploys_and_its_user_config_changes_live(
    application: dict[str, Any], ray_head: ClusterState, http_port: int, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{http_port}"

    def answer(prompt: str) -> httpx.Response:
        body = {"model": "sim", "prompt": prompt, "max_tokens": 2}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    def pids() -> set[int]:
        deployments = serve.context._get_global_client().get_serve_details()["applications"]["by-file"][
            "deployments"
        ]
        return {replica["pid"] for name in deployments for replica in deployments[name]["replicas"]}

    def ready() -> bool:
        try:
            return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    run(application, ray_head, http_port, tmp_path)
    wait_for("a ready endpoint", ready, 90)
    assert answer("short").status_code == 200
    assert answer("x" * 150_000).status_code == 413

    before = pids()
    application["deployments"][0]["user_config"]["limits"]["max_body_bytes"] = 200_000
    run(application, ray_head, http_port, tmp_path)
    wait_for("the new limit", lambda: answer("x" * 150_000).status_code == 200, 60)
    assert pids() == before
