"""`manta up` and `manta down`: Ray, the application on it, and the end of both."""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.console import Console

from cluster import ray_cluster, state
from cluster.config import ClusterConfig
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
        started_at = time.monotonic()
        cluster = self.start(console)
        console.print(
            f"ready at {cluster.endpoint} after {time.monotonic() - started_at:.0f} s", highlight=False
        )
        if detach or cluster.head is None:
            return
        console.print("`manta status` shows it; Ctrl-C here or `manta down` stops it")
        try:
            psutil.Process(cluster.head.pid).wait()
            if state.find(cluster.name) is not None:
                raise UpError(f"Ray's head ended by itself, its logs are in {cluster.temp}")
        except psutil.NoSuchProcess:
            pass
        finally:
            if state.find(cluster.name) == cluster:
                console.print(take_down(cluster), highlight=False)

    def start(self, console: Console) -> ClusterState:
        """The cluster, ready, with this process connected to its Ray."""
        if self._address is None:
            ray_cluster.use_local_ray()
        # Importing Ray takes seconds and reads the environment: not before here.
        from cluster.deploy import DeployError, deploy

        with console.status(
            "starting Ray" if self._address is None else f"connecting to {self._address}"
        ) as spinner:
            if self._address is None:
                cluster = ray_cluster.start(self._config, self._config_path, self._config.endpoint)
            else:
                name, where = self._config.name, self._config.endpoint
                cluster = ClusterState(name, self._config_path, self._address, where)

            last = ""

            def on_status(status: DeployStatus) -> None:
                nonlocal last
                line = f"{status.phase.lower()}, {status.replicas_ready} of {status.replicas_wanted} replicas"
                spinner.update(line)
                if not console.is_terminal and line != last:
                    console.print(line, highlight=False)
                last = line

            try:
                _connect(cluster.ray_address)
                deploy(self._config, on_status)
            except BaseException as error:
                message = _undo(cluster)
                if isinstance(error, DeployError | ConnectionError):
                    raise UpError(f"{error}\n{message}") from error
                raise
        if cluster.head is None:
            state.save(cluster)
        return cluster


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


def _undo(cluster: ClusterState) -> str:
    """After a failure on a Ray that is not ours the application stays, for its owner to look at."""
    if cluster.head is None:
        return f"what there is of {cluster.name} stays at {cluster.ray_address}, for `serve status` to show"
    report = ray_cluster.stop(cluster)
    return f"stopped again ({report.stopped} processes); logs are in {cluster.temp}"


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
