"""Ray on the hosts of a lab: a head, workers joined by ssh, and a look at who is alive."""

from __future__ import annotations

import shlex
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from tests.hosts.host import Host, HostError, kill_tree
from tests.hosts.lab import REPOSITORY

PORT = 6379
TEMP = "/tmp/ray"
WATCH = Path(__file__).with_name("watch_nodes.py")
ALIVE = "alive:"
"""How its lines begin."""
NOTICE_SOON = {
    # Ray's own take 15 s for a crash and 65 s for a cut.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
}
"""A dead host is noticed in seconds. Every node needs them."""


class RayHosts:
    """One Ray cluster on a lab's hosts. The head takes no work unless it is given CPUs.

        with RayHosts(head, workers) as ray:
            ray.wait_alive({"head", "a", "b"})

    A token turns authentication on; without one it is off, which is for a lab alone.
    """

    def __init__(
        self,
        head: Host,
        workers: Sequence[Host] = (),
        head_cpus: int = 0,
        worker_cpus: int = 1,
        object_store_mib: int = 80,
        dashboard: bool = False,
        token: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`env` is for every Ray process. /dev/shm of each host must hold `object_store_mib`."""
        self.head = head
        self.workers = list(workers)
        self.address = f"{head.address}:{PORT}"
        self._head_cpus = head_cpus
        self._worker_cpus = worker_cpus
        self._object_store = object_store_mib << 20
        self._dashboard = dashboard
        auth = (
            {"RAY_AUTH_MODE": "disabled"}
            if token is None
            else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        )
        common = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(REPOSITORY)}
        self.env = NOTICE_SOON | common | auth | dict(env or {})
        """What a program on a host needs to connect, too."""
        self._watcher: _Watcher | None = None
        self._started = False

    def __enter__(self) -> RayHosts:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when the head and all workers have joined. Raises HostError."""
        self._started = True
        options: dict[str, object] = {
            "head": None,
            "port": PORT,
            "temp-dir": TEMP,
            "num-cpus": self._head_cpus,
            "include-dashboard": str(self._dashboard).lower(),
            "dashboard-host": "0.0.0.0",
        }
        self.head.run(self._ray_start(self.head, options), timeout_s=120, env=self.env)
        self._watcher = _Watcher(self.head, self.address, self.env)
        with ThreadPoolExecutor(max(1, len(self.workers))) as pool:
            list(pool.map(self._join, self.workers))
        self.wait_alive({self.head.name, *(worker.name for worker in self.workers)}, 60.0)

    def join(self, worker: Host) -> None:
        """One more worker, or one that has crashed and was started again. Raises HostError."""
        self._join(worker)
        if worker not in self.workers:
            self.workers.append(worker)

    def alive(self) -> set[str]:
        """Names of the hosts that Ray counts as alive, a fraction of a second ago."""
        return self.wait_alive(None, 60.0)

    def wait_alive(self, names: Iterable[str] | None, timeout_s: float = 10.0) -> set[str]:
        """Wait until Ray counts exactly these hosts as alive; None takes any. Raises HostError when it is too late."""
        assert self._watcher is not None, "not started"
        known = {host.address: host.name for host in (self.head, *self.workers)}
        wanted = None if names is None else set(names)
        return self._watcher.wait(known, wanted, timeout_s)

    def stop(self) -> None:
        """On every host that is up; the others have nothing left to stop. A second call does nothing."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None
        hosts = (*self.workers, self.head) if self._started else ()
        self._started = False
        for host in hosts:
            if host.is_up:
                host.run("ray stop --force", timeout_s=60, env=self.env)

    def _join(self, worker: Host) -> None:
        command = self._ray_start(worker, {"address": self.address, "num-cpus": self._worker_cpus})
        # ssh carries no environment.
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.env.items())
        self.head.ssh(worker, f"env {exports} {command}", timeout_s=120)

    def _ray_start(self, host: Host, options: dict[str, object]) -> str:
        common: dict[str, object] = {
            "node-ip-address": host.address,
            "object-store-memory": self._object_store,
            "disable-usage-stats": None,
        }
        given = (
            f"--{name}" if value is None else f"--{name}={value}"
            for name, value in (options | common).items()
        )
        return f"ray start {' '.join(given)}"


class _Watcher:
    """Reads who is alive from a program on the head, which says it whenever it changes."""

    def __init__(self, head: Host, address: str, env: Mapping[str, str]) -> None:
        self._process = head.popen(
            f"exec python {shlex.quote(str(WATCH))} {address}", env=env, stdout=subprocess.PIPE
        )
        self._changed = threading.Condition()
        self._addresses: frozenset[str] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self, names: Mapping[str, str], wanted: set[str] | None, timeout_s: float) -> set[str]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                found = self._addresses and {names.get(address, address) for address in self._addresses}
                if found and (wanted is None or found == wanted):
                    return set(found)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise HostError(
                        f"alive after {timeout_s} s: {found or 'unknown'}; wanted: {wanted or 'any'}"
                    )
                self._changed.wait(left)

    def close(self) -> None:
        kill_tree(self._process)
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            first, *addresses = line.split() or [""]
            if first == ALIVE:
                with self._changed:
                    self._addresses = frozenset(addresses)
                    self._changed.notify_all()
