"""What `manta up` started on this machine, in one file per cluster."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from cluster.processes import ProcessId, is_alive


class StateError(RuntimeError):
    """No state, or more than one, where one is needed. The message lists what there is."""


class ClusterState(msgspec.Struct, frozen=True):
    """A running cluster."""

    name: str
    config: str
    """Path of the configuration file."""
    ray_address: str
    endpoint: str
    head: ProcessId | None = None
    """Ray's head process; None when the cluster was deployed to a Ray that was there before."""
    mark: str = ""
    """Value of `processes.MARK` in the environment of everything that the head started."""
    temp: str = ""
    """The session's folder: Ray's logs and sockets, HAProxy's files."""
    ready: bool = False
    """`manta up` has seen the endpoint answer, and waits for the end."""
    stopping: bool = False
    """Someone stops it at this moment, or was interrupted at it."""

    @property
    def running(self) -> bool:
        """Whether the head that this file names still runs; of a foreign Ray that is not known here, so True."""
        return self.head is None or is_alive(self.head)


def state_folder() -> Path:
    """`$MANTA_STATE`, `~/.local/state/manta` where that is not set."""
    given = os.environ.get("MANTA_STATE")
    return Path(given).expanduser() if given else Path.home() / ".local" / "state" / "manta"


def save(state: ClusterState) -> None:
    """Written whole or not at all."""
    path = _path(state.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
    partial.replace(path)


def forget(name: str) -> None:
    _path(name).unlink(missing_ok=True)


def find(name: str) -> ClusterState | None:
    """Raises StateError for a file that can't be read."""
    path = _path(name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=ClusterState)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise StateError(f"{path}: can't be read as a cluster's state: {error}") from error


def names() -> list[str]:
    return sorted(path.stem for path in state_folder().glob("*.json"))


def only(name: str | None) -> ClusterState | None:
    """The named cluster; without a name the only one. None where there is none, StateError where there are several."""
    if name is None:
        there = names()
        if len(there) > 1:
            raise StateError(
                f"{len(there)} clusters are known here, say which with --name: {', '.join(there)}"
            )
        if not there:
            return None
        name = there[0]
    return find(name)


def _path(name: str) -> Path:
    return state_folder() / f"{name}.json"
