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
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)


LEAVING_S = 60.0
"""Longest wait for the cores of a holder that is on its way out."""
_LEAVING = b"leaving"
_POLL_S = 0.05


class CoreLease:
    """Cores held until `release` or the end of the process."""

    def __init__(self, cores: tuple[int, ...], files: list[int]) -> None:
        self.cores = cores
        self._files = files

    def leave(self, leaving: bool = True) -> None:
        """Say whether the holder is on its way out: who needs its cores then waits for them.

        A replica that is given up is replaced at once, and takes its time to end: without this its successor would
        share another replica's core for good.
        """
        for file in self._files:
            os.ftruncate(file, 0)
            if leaving:
                os.pwrite(file, _LEAVING, 0)

    def release(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


def lease_cores(
    count: int,
    folder: Path | None = None,
    available: set[int] | None = None,
    leaving_s: float = LEAVING_S,
) -> CoreLease:
    """Take `count` cores that no other replica of this user holds.

    Where too few are free, those of holders that leave are waited for, `leaving_s` at most. The ones still missing are
    shared and a warning says so: a slow replica is better than none. `available` defaults to the cores that this
    process may run on.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"manta-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    candidates = sorted(available if available is not None else os.sched_getaffinity(0))
    held: dict[int, int] = {}
    deadline = time.monotonic() + leaving_s
    while True:
        leaving = _take(candidates, count, folder, held)
        if len(held) == count or not leaving or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    cores = sorted(held)
    if len(cores) < count:
        shared = [core for core in candidates if core not in held] or candidates
        missing = [shared[i % len(shared)] for i in range(count - len(cores))]
        logger.warning(
            "%d cores asked for, %d of %d are free: cores %s are shared with other replicas",
            count, len(cores), len(candidates), missing,
        )  # fmt: skip
        cores += missing
    return CoreLease(tuple(cores), list(held.values()))


def _take(candidates: Sequence[int], count: int, folder: Path, held: dict[int, int]) -> bool:
    """Add free cores to `held`, by their locked files, up to `count`. Whether a holder of another one leaves."""
    leaving = False
    for core in candidates:
        if len(held) == count:
            break
        if core in held:
            continue
        file = os.open(folder / f"core-{core}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            leaving = leaving or os.pread(file, len(_LEAVING), 0) == _LEAVING
            os.close(file)
            continue
        os.ftruncate(file, 0)
        held[core] = file
    return leaving


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
