"""LMCache's MP server, and the connector that engines reach it with.

It wants vLLM's own packages around it, so it is no part of the peers' environment: its files lie in a folder there,
which the engine's Python gets on its path.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from benchmarks import peers
from benchmarks.engines import CHUNK_TOKENS
from benchmarks.line_process import python_path

HOST = "127.0.0.1"
START_TIMEOUT_S = 120.0
NAME = "LMCache's MP server"


def folder() -> Path | None:
    """None where it is not installed."""
    path = peers.environment() / "lmcache"
    return path if (path / "lmcache").is_dir() else None


@contextmanager
def server(l1_gib: int = 1) -> Iterator[dict[str, Any]]:
    """A running server: vLLM's kv-transfer-config for its engines."""
    from cluster.ray_cluster import free_ports

    port, http, prometheus = free_ports(3)
    command = [
        sys.executable, "-m", "lmcache.cli.main", "server", "--supported-transfer-mode", "engine_driven",
        "--host", HOST, "--port", str(port), "--http-host", HOST, "--http-port", str(http),
        "--prometheus-port", str(prometheus), "--disable-observability", "--l1-size-gb", str(l1_gib),
        "--eviction-policy", "LRU", "--chunk-size", str(CHUNK_TOKENS),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": python_path(folder()), "LMCACHE_DISABLE_BANNER": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            _wait_answers(process, http, log)
            yield {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.host": f"tcp://{HOST}", "lmcache.mp.port": port},
            }
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait_answers(process: subprocess.Popen[bytes], http: int, log: IO[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        with suppress(OSError):
            urllib.request.urlopen(f"http://{HOST}:{http}/healthcheck", timeout=5).close()
            return
        if process.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            raise RuntimeError(f"{NAME} does not answer:\n{log.read().decode(errors='replace')[-3000:]}")
        time.sleep(0.2)
