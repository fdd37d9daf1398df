"""The `manta` command as a person runs it: a process of its own, with state and ports of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec
import yaml

from cluster import processes
from cluster.ray_cluster import DRIVER, LOCAL_RAY, SERVE, free_ports
from cluster.state import ClusterState


class Commands:
    """Runs `manta` on one configuration, and knows what it started."""

    def __init__(self, state: Path, folder: Path, config: dict[str, object]) -> None:
        http, ray = free_ports(2)
        self.state = state
        self.name = str(config["name"])
        self.endpoint = f"http://127.0.0.1:{http}"
        self.config = folder / f"{self.name}.yaml"
        sections = config | {"http": {"port": http}, "ray": {"port": ray, "object_store_mib": 80}}
        self.config.write_text(yaml.safe_dump(sections), encoding="utf-8")
        self._seen: ClusterState | None = None

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        # What this test process has set for Ray of its own is not there where a person types.
        environment = {
            name: value for name, value in os.environ.items() if name not in LOCAL_RAY | SERVE | DRIVER
        }
        return subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", *arguments],
            env=environment | {"MANTA_STATE": str(self.state)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            # A test run in the background ignores Ctrl-C, and its children would too.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def run(self, *arguments: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        return self.ended(process, timeout)

    def ended(self, process: subprocess.Popen[str], timeout: float = 180) -> subprocess.CompletedProcess[str]:
        """Wait for the end, and look at what runs meanwhile; a process that takes too long is killed."""
        deadline = time.monotonic() + timeout
        try:
            while True:
                self.known()
                try:
                    out, err = process.communicate(timeout=0.2)
                except subprocess.TimeoutExpired:
                    assert time.monotonic() < deadline, f"{process.args} did not end in {timeout} s"
                    continue
                return subprocess.CompletedProcess(process.args, process.returncode, out, err)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def known(self) -> ClusterState | None:
        """The cluster that the state file names, or the last one it did."""
        with suppress(FileNotFoundError):
            written = (self.state / f"{self.name}.json").read_bytes()
            self._seen = msgspec.json.decode(written, type=ClusterState)
        return self._seen

    def left(self) -> list[str]:
        """Processes of the clusters that were seen. One that the state file never named is not looked for."""
        assert self._seen is not None, "no cluster was seen to run"
        assert self._seen.head is not None
        return [each.name() for each in processes.belonging_to(self._seen.head, self._seen.mark)]

    def close(self) -> None:
        """Stop whatever a failed test left behind."""
        if self._seen is not None and self._seen.head is not None:
            processes.stop(self._seen.head, self._seen.mark)
