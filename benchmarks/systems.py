"""The systems that stand in front of the fake backends, each started here and stopped here.

Manta is deployed as it ships: Ray, Serve, HAProxy, the router's deployment with all of its options. Only the pool of
replicas is another one, which names the fakes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from benchmarks import peers
from benchmarks.fake_backend import MODEL
from benchmarks.harness import cpu_seconds

HOST = "127.0.0.1"
FAKES = ("fake-0", "fake-1")
SECRET = "the-secret-of-a-benchmark"
READY_TIMEOUT_S = 240.0
_ARGUMENTS = {
    "vllm-router": ["--log-level", "warning"],
    # Without a level it writes two lines per request.
    "smg": ["launch", "--log-level", "warn"],
}
TEXT_ONLY = {"smg"}
"""Peers whose completions take a text and no token ids."""


@dataclass(frozen=True)
class System:
    """Something that takes requests at a port."""

    name: str
    port: int
    parts: Callable[[], dict[str, float]]
    """CPU seconds so far, by part of the system."""
    takes_token_ids: bool = True


class StartError(RuntimeError):
    """A system did not start. The message ends with what it wrote."""


@contextmanager
def backends() -> Iterator[dict[str, int]]:
    """The fakes' ports by id."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.fake_backend", *FAKES],
        cwd=peers.ROOT, env=os.environ | {"MANTA_SECRET": SECRET}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(10)


def set_pace(port: int, chunks: int, interval_ms: float) -> None:
    request = urllib.request.Request(f"http://{HOST}:{port}/pace?chunks={chunks}&ms={interval_ms}", data=b"")
    urllib.request.urlopen(request, timeout=10).close()


@contextmanager
def peer(name: str, fakes: dict[str, int]) -> Iterator[System]:
    """A router of others, in front of the fakes. `name` is its command in the peers' environment."""
    from cluster.ray_cluster import free_ports

    executable = peers.command(name)
    assert executable is not None, name
    port, metrics = free_ports(2)
    command = [
        str(executable),
        *_ARGUMENTS[name],
        "--host",
        HOST,
        "--port",
        str(port),
        "--prometheus-port",
        str(metrics),
    ]
    command += [
        "--worker-urls",
        *(f"http://{HOST}:{each}" for each in fakes.values()),
        "--policy",
        "cache_aware",
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_answers(port, process, log)
            yield System(name, port, lambda: {name: cpu_seconds(process.pid)}, name not in TEXT_ONLY)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_answers(port: int, process: subprocess.Popen[bytes], log: Any) -> None:
    """Until a completion comes back. Raises StartError."""
    body = json.dumps({"model": MODEL, "prompt": "ready?", "max_tokens": 1, "stream": True}).encode()
    headers = {"content-type": "application/json"}
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        request = urllib.request.Request(f"http://{HOST}:{port}/v1/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                answer.read()
                return
        except (urllib.error.URLError, OSError) as error:
            found = error
        if process.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            raise StartError(f"{process.args!r} does not answer ({found}):\n{log.read().decode()[-2000:]}")
        time.sleep(0.1)


class FakePool:
    """Deployment class that stands where `workers.replica.Replica` does, and hosts nothing."""

    def __init__(self, infos: list[dict[str, Any]]) -> None:
        self._infos = infos

    def record_replica_metadata(self) -> dict[str, Any]:
        return {"replicas": self._infos}

    async def describe(self) -> list[dict[str, Any]]:
        return self._infos


@contextmanager
def manta(fakes: dict[str, int]) -> Iterator[System]:
    """Manta's router in front of the fakes, on a Ray of its own.

    Until it is stopped, a SIGTERM is an exit of this process that stops it first.
    """
    on_sigterm = signal.signal(signal.SIGTERM, _exit)
    with tempfile.TemporaryDirectory(prefix="mb-", dir="/tmp") as state:
        # What Ray starts finds `FakePool` by its module.
        path = os.pathsep.join(filter(None, (str(peers.ROOT), os.environ.get("PYTHONPATH"))))
        with mock.patch.dict(os.environ, {"MANTA_STATE": state, "MANTA_SECRET": SECRET, "PYTHONPATH": path}):
            from cluster import ray_cluster
            from cluster.config import ClusterConfig

            ray_cluster.use_local_ray()
            http, gcs = ray_cluster.free_ports(2)
            config = ClusterConfig.parse(
                {
                    "name": "bench",
                    "engine": {"kind": "sim"},
                    "http": {"port": http},
                    "ray": {"port": gcs, "object_store_mib": 120},
                }
            )
            head = ray_cluster.start(config, "bench", config.endpoint)
            try:
                _deploy(config, head.ray_address, fakes)
                yield System("manta", http, _parts_of(head, config.name))
            finally:
                _leave()
                ray_cluster.stop(head)
                signal.signal(signal.SIGTERM, on_sigterm)


def _deploy(config: Any, ray_address: str, fakes: dict[str, int]) -> None:
    import logging

    import msgspec
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from cluster import app
    from cluster.deploy import deploy
    from workers.messages import ReplicaInfo

    infos = [
        ReplicaInfo(name, "unified", "bench", f"{HOST}:{port}", (MODEL,)) for name, port in fakes.items()
    ]

    def pool(*_: Any) -> Any:
        options: dict[str, Any] = {
            "name": "unified",
            "max_ongoing_requests": 1_000_000,
            "ray_actor_options": {"num_cpus": 0},
            "request_router_config": RequestRouterConfig(
                request_router_class="router.request_router:MantaRequestRouter",
                request_router_kwargs={"app": config.name, "pool": "unified"},
            ),
        }
        return serve.deployment(FakePool).options(**options).bind([msgspec.to_builtins(i) for i in infos])

    ray.init(address=ray_address, namespace="manta", log_to_driver=False, logging_level=logging.WARNING)
    # Ray puts a handler of its own there, which aborts the process.
    signal.signal(signal.SIGTERM, _exit)
    logging.getLogger(serve.__name__).setLevel(logging.WARNING)
    with mock.patch.object(app, "_pool", pool):
        deploy(config, timeout_s=READY_TIMEOUT_S)


def _parts_of(head: Any, app: str) -> Callable[[], dict[str, float]]:
    import psutil
    from ray import serve

    from cluster.processes import belonging_to
    from router.shared_core import DEPLOYMENT

    details = serve.context._get_global_client().get_serve_details()
    replicas = details["applications"][app]["deployments"][DEPLOYMENT]["replicas"]
    routers = [replica["pid"] for replica in replicas if replica["state"] == "RUNNING"]

    def parts() -> dict[str, float]:
        found = {"router": sum(cpu_seconds(pid, tree=False) for pid in routers), "haproxy": 0.0, "rest": 0.0}
        for process in belonging_to(head.head, head.mark):
            try:
                name = process.name()
            except psutil.Error:
                continue
            if process.pid not in routers:
                part = "haproxy" if name.startswith("haproxy") else "rest"
                found[part] += cpu_seconds(process.pid, tree=False)
        return found

    return parts


def _exit(*_: object) -> None:
    sys.exit(128 + signal.SIGTERM)


def _leave() -> None:
    import ray

    ray.shutdown()
