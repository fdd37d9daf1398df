"""CPU cores that one replica has to itself.

Replicas of several deployments, and of several clusters, can share a machine without knowing each other, so a core
is held by a locked file: the system frees it when its holder dies, however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)


class CoreLease:
    """Cores held until `release` or the end of the process."""

    def __init__(self, cores: tuple[int, ...], files: list[int]) -> None:
        self.cores = cores
        self._files = files

    def release(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


def lease_cores(count: int, folder: Path | None = None, available: set[int] | None = None) -> CoreLease:
    """Take `count` cores that no other replica of this user holds.

    Where too few are free, the missing ones are shared and a warning says so: a slow replica is better than none.
    `available` defaults to the cores that this process may run on.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"manta-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    candidates = sorted(available if available is not None else os.sched_getaffinity(0))
    cores: list[int] = []
    files: list[int] = []
    for core in candidates:
        if len(cores) == count:
            break
        file = os.open(folder / f"core-{core}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        cores.append(core)
        files.append(file)
    if len(cores) < count:
        shared = [core for core in candidates if core not in cores] or candidates
        missing = [shared[i % len(shared)] for i in range(count - len(cores))]
        logger.warning(
            "%d cores asked for, %d of %d are free: cores %s are shared with other replicas",
            count, len(cores), len(candidates), missing,
        )  # fmt: skip
        cores += missing
    return CoreLease(tuple(cores), files)


def split_cores(cores: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """The cores of each rank of one engine. Where there are fewer cores than ranks, the last ranks share one."""
    share = max(1, len(cores) // ranks)
    return [tuple(cores[rank * share : (rank + 1) * share] or cores[-1:]) for rank in range(ranks)]


@contextlib.contextmanager
def running_on(cores: Sequence[int]) -> Iterator[None]:
    """What this thread starts inside, threads and processes, runs on these cores alone; any cores where none are given.

    An affinity is inherited, so what is started can't run anywhere else for even a moment.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
