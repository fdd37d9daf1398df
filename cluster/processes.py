"""Processes that belong to one started program, wherever they have moved to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import psutil

MARK = "MANTA_CLUSTER_MARK"
"""Environment variable that a program and all that it starts carry."""


class ProcessId(msgspec.Struct, frozen=True):
    """A process and no other that later gets the same number."""

    pid: int
    created: float
    """Seconds since the epoch, as the system counts them."""


class StopReport(NamedTuple):
    """How a stop went."""

    stopped: int
    """Processes that ended, the killed ones included."""
    killed: int
    """Of those, the ones that did not end by themselves in time."""
    left: tuple[int, ...]
    """Process ids that are still there."""


def identify(pid: int) -> ProcessId:
    """Raises ProcessLookupError when there is no such process."""
    try:
        return ProcessId(pid, psutil.Process(pid).create_time())
    except psutil.NoSuchProcess as error:
        raise ProcessLookupError(pid) from error


def is_alive(process: ProcessId) -> bool:
    """False for a zombie: it holds nothing but its number."""
    return _find(process) is not None


def belonging_to(head: ProcessId, mark: str) -> list[psutil.Process]:
    """The head, if it lives, and everything that descends from it.

    Three ways to belong, because each misses some: a descendant (lost when a parent dies), a member of the head's
    session (lost by setsid), a carrier of the mark (lost by a process that overwrites its environment with a title).
    """
    found: dict[int, psutil.Process] = {}
    session_is_ours = True
    if leader := _find(head):
        found[leader.pid] = leader
        found |= {child.pid: child for child in leader.children(recursive=True)}
    else:
        # A number is not given out again while a session bears it, so whoever has it now means: no member is left.
        session_is_ours = not psutil.pid_exists(head.pid)
    for process in psutil.process_iter():
        if process.pid not in found and (
            (session_is_ours and _session(process.pid) == head.pid) or _carries(process, mark)
        ):
            found[process.pid] = process
    found.pop(os.getpid(), None)
    return [process for process in found.values() if _lives(process)]


def stop(head: ProcessId, mark: str, grace_s: float = 15.0, kill_s: float = 5.0) -> StopReport:
    """Ask the head to end, then what it leaves behind, then kill; returns when all are gone or the time is over."""
    members = belonging_to(head, mark)
    first = [process for process in members if process.pid == head.pid]
    _signal(first, kill=False)
    deadline = time.monotonic() + grace_s
    _gone, _ = psutil.wait_procs(first, timeout=grace_s)
    # What the head did not take with it: grandchildren in sessions of their own, and what was started meanwhile.
    members = _merge(members, belonging_to(head, mark))
    rest = [process for process in members if _lives(process) and process.pid != head.pid]
    _signal(rest, kill=False)
    psutil.wait_procs(rest, timeout=max(2.0, deadline - time.monotonic()))
    members = _merge(members, belonging_to(head, mark))
    stubborn = [process for process in members if _lives(process)]
    _signal(stubborn, kill=True)
    psutil.wait_procs(stubborn, timeout=kill_s)
    left = tuple(process.pid for process in members if _lives(process))
    return StopReport(len(members) - len(left), len(stubborn) - len(left), left)


def _find(process: ProcessId) -> psutil.Process | None:
    try:
        found = psutil.Process(process.pid)
        # The system's clock ticks a hundred times a second; the sum with the boot time may round either way.
        same = abs(found.create_time() - process.created) < 0.5
    except psutil.Error:
        return None
    return found if same and _lives(found) else None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _carries(process: psutil.Process, mark: str) -> bool:
    if not mark:
        return False
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def _signal(processes: Iterable[psutil.Process], kill: bool) -> None:
    for process in processes:
        try:
            # psutil compares the creation time before it signals.
            process.kill() if kill else process.terminate()
        except psutil.NoSuchProcess:
            continue


def _merge(known: list[psutil.Process], new: list[psutil.Process]) -> list[psutil.Process]:
    return list({process.pid: process for process in [*known, *new]}.values())
