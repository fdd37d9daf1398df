"""`manta up` and `manta down`: Ray, the application on it, and the end of both."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
from rich.console import Console

from cluster import ray_cluster, state
from cluster.config import ClusterConfig
from cluster.processes import ProcessId
from cluster.state import ClusterState

if TYPE_CHECKING:
    from cluster.deploy import DeployStatus

NAMESPACE = "manta"


class UpError(RuntimeError):
    """A cluster that could not be started or stopped. The message is for the person who asked."""


class Launcher:
    """Brings one cluster up, and down again when it was not asked to stay."""

    def __init__(self, config: ClusterConfig, config_path: Path, address: str | None = None) -> None:
        self._config = config
        self._config_path = str(config_path)
        self._address = address

    def run(self, console: Console, detach: bool) -> None:
        """Returns when the cluster is ready (detached, or on a Ray that was there) or has ended.

        Raises UpError, RayStartError or KeyboardInterrupt, with nothing that it started left running.
        """
        began = time.monotonic()
        with self.running(console, keep=detach) as cluster:
            console.print(
                f"ready at {cluster.endpoint} after {time.monotonic() - began:.0f} s", highlight=False
            )
            if cluster.head is None:
                return
            if detach:
                console.print("`manta status` shows it, `manta down` stops it")
                return
            console.print("`manta status` shows it; Ctrl-C here or `manta down` stops it")
            _wait_ended(cluster.head)
            there = state.find(cluster.name)
            if there is not None and not there.stopping:
                raise UpError(f"Ray's head ended by itself, its logs are in {ray_cluster.logs_of(cluster)}")

    @contextmanager
    def running(self, console: Console, keep: bool) -> Iterator[ClusterState]:
        """The cluster, ready, for the length of the block; after it the cluster stays only if `keep` and all went well.

        Nothing is stopped on a Ray that was there before. Raises what `start` and the block raise.
        """
        left = False
        try:
            yield self.start(console)
            left = keep
        finally:
            if not left:
                self._end(console)

    def change(self, config: ClusterConfig) -> None:
        """Deploy another configuration to the running cluster. Raises UpError."""
        from cluster.deploy import DeployError, deploy

        try:
            deploy(config)
        except (DeployError, ConnectionError) as error:
            raise UpError(str(error)) from error

    def start(self, console: Console) -> ClusterState:
        """The cluster, ready, with this process connected to its Ray."""
        if self._address is None:
            ray_cluster.use_local_ray()
        # Importing Ray takes seconds and reads the environment: not before here.
        from cluster.deploy import DeployError, deploy

        first = "starting Ray" if self._address is None else f"connecting to {self._address}"
        with _progress(console, first) as show:
            if self._address is None:
                cluster = ray_cluster.start(self._config, self._config_path, self._config.endpoint)
            else:
                name, where = self._config.name, self._config.endpoint
                cluster = ClusterState(name, self._config_path, self._address, where)
            try:
                _connect(cluster.ray_address)
                deploy(self._config, lambda status: show(_describe(status)))
            except BaseException as error:
                message = _undo(cluster)
                if isinstance(error, DeployError | ConnectionError):
                    raise UpError(f"{error}\n{message}") from error
                console.print(message, highlight=False)
                raise
        there = state.find(cluster.name)
        # Somebody elsewhere may be stopping it by now: what they have forgotten must not come back.
        if cluster.head is None or (there is not None and not there.stopping):
            cluster = msgspec.structs.replace(cluster, ready=True)
            state.save(cluster)
        return cluster

    def _end(self, console: Console) -> None:
        # Looked up, since an interrupt may have come between the start and anyone's knowing of it.
        there = state.find(self._config.name)
        if self._address is None and there is not None and not there.stopping:
            _disconnect()
            with _progress(console, "stopping"):
                console.print(take_down(there), highlight=False)


def take_down(cluster: ClusterState) -> str:
    """Stop the cluster and say what was stopped. Raises UpError when something of it is left."""
    if cluster.head is None:
        _delete_application(cluster)
        state.forget(cluster.name)
        return f"{cluster.name} is deleted from the Ray at {cluster.ray_address}, which goes on"
    began = time.monotonic()
    report = ray_cluster.stop(cluster)
    if report.left:
        raise UpError(
            f"{cluster.name}: processes {', '.join(map(str, report.left))} did not end, not even killed"
        )
    killed = f", {report.killed} of them killed" if report.killed else ""
    return f"{cluster.name} is down: {report.stopped} processes ended{killed}, in {time.monotonic() - began:.0f} s"


def _connect(address: str) -> None:
    import ray
    from ray import serve

    on_sigterm = signal.getsignal(signal.SIGTERM)
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    # Ray puts a handler there that aborts the process; ours stops the cluster first.
    signal.signal(signal.SIGTERM, on_sigterm)
    # What Serve says of its own progress, `deploy` says in one line that is kept up to date.
    logging.getLogger(serve.__name__).setLevel(logging.WARNING)


@contextmanager
def _progress(console: Console, first: str) -> Iterator[Callable[[str], None]]:
    """A line that is kept up to date, with the seconds so far; in a pipe, a line for every change."""
    began = time.monotonic()
    last = ""
    with console.status(first) if console.is_terminal else nullcontext() as spinner:

        def show(line: str) -> None:
            nonlocal last
            if spinner is not None:
                spinner.update(f"{line} ({time.monotonic() - began:.0f} s)")
            elif line != last:
                console.print(line, highlight=False)
            last = line

        if spinner is None:
            show(first)
        yield show


def _describe(status: DeployStatus) -> str:
    replicas = f", {status.replicas_ready} of {status.replicas_wanted} replicas are up"
    return status.phase + (replicas if status.replicas_wanted else "")


def _disconnect() -> None:
    """This process would complain of a Ray that is gone, and it may have come only as far as importing it."""
    if ray := sys.modules.get("ray"):
        ray.shutdown()


def _wait_ended(head: ProcessId) -> None:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(head.pid).wait()


def _undo(cluster: ClusterState) -> str:
    """After a failure on a Ray that is not ours the application stays, for its owner to look at."""
    if cluster.head is None:
        return f"what there is of {cluster.name} stays at {cluster.ray_address}, for `serve status` to show"
    _disconnect()
    report = ray_cluster.stop(cluster)
    return f"{cluster.name} is down again ({report.stopped} processes); logs are in {ray_cluster.logs_of(cluster)}"


def _delete_application(cluster: ClusterState) -> None:
    import ray
    from ray import serve

    try:
        _connect(cluster.ray_address)
        serve.delete(cluster.name)
    except Exception as error:
        # Whatever Ray raises here, the person needs the same two things: which cluster, and what it said.
        raise UpError(
            f"{cluster.name} can't be deleted from the Ray at {cluster.ray_address}: {error}"
        ) from error
    finally:
        ray.shutdown()
