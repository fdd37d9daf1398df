"""`manta drain`: take a replica, or all of a node's, out of service without a failed request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cluster.admin import Admin, AdminError
from cluster.status import Answer, ReplicaStatus

_POLL_S = 0.5
_LOOKS = 2
"""A request that another router had sent before it heard may still be under way: one look at nothing is not enough."""


class DrainError(RuntimeError):
    """Requests were still open when the time was up. The message says where, and that nothing was undone."""


class Told(msgspec.Struct, frozen=True):
    """One replica that heard."""

    id: str
    node: str
    address: str
    draining: bool
    open_requests: int


class _Answer(msgspec.Struct, frozen=True):
    replicas: list[Told]


class Left(NamedTuple):
    """What is still to end."""

    open_requests: dict[str, int]
    """By replica, of those that are there."""
    gone: frozenset[str]
    """Replicas that are no more."""

    @property
    def total(self) -> int:
        return sum(self.open_requests.values())


def ask_drain(admin: Admin, name: str, undo: bool = False, force: bool = False) -> list[Told]:
    """Tell what is named. Raises AdminError."""
    body = admin.ask("/admin/replicas/drain", {"name": name, "undo": undo, "force": force})
    return msgspec.json.decode(body, type=_Answer).replicas


def left_open(admin: Admin, replicas: list[Told]) -> Left | None:
    """None while a router does not know yet that all of them drain. Raises AdminError."""
    answer = msgspec.json.decode(admin.ask("/admin/replicas"), type=Answer)
    known = {each.id: each for each in answer.replicas}
    there = {each.id: known[each.id] for each in replicas if each.id in known}
    if any(each.state == "ready" for each in there.values()):
        return None
    gone = frozenset(each.id for each in replicas if each.id not in known)
    return Left({name: _open(each) for name, each in there.items()}, gone)


def _open(replica: ReplicaStatus) -> int:
    return max(replica.open_requests, replica.waiting + replica.running)


def wait_drained(
    admin: Admin,
    replicas: list[Told],
    timeout_s: float,
    on_look: Callable[[Left], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Left:
    """Return once nothing is open at any of them. A router that does not answer meanwhile is asked again.

    Raises DrainError after `timeout_s`, and AdminError for an answer that another try will not change.
    """
    end = clock() + timeout_s
    quiet, problem = 0, ""
    while True:
        try:
            left = left_open(admin, replicas)
            if left is None:
                quiet, problem = 0, "there is a router that has not heard of it yet"
            else:
                on_look(left)
                quiet, problem = 0 if left.total else quiet + 1, _still_open(left)
                if quiet >= _LOOKS:
                    return left
        except AdminError as error:
            if error.status is not None and error.status < 500:
                raise
            quiet, problem = 0, str(error)
        if clock() >= end:
            raise DrainError(
                f"after {timeout_s:g} s: {problem}. Nothing new goes there all the same; wait with the same command "
                "again, or take it back with --undo"
            )
        sleep(_POLL_S)


def _still_open(left: Left) -> str:
    return ", ".join(
        f"{name} has {count} open request{'s' if count != 1 else ''}"
        for name, count in left.open_requests.items()
        if count
    )


@contextmanager
def progress(console: Console, replicas: list[Told]) -> Iterator[Callable[[Left], None]]:
    """A bar for each replica that fills as its requests end; in a pipe, a line for every change."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[open]} open"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    most = {each.id: each.open_requests for each in replicas}
    tasks: dict[str, TaskID] = {
        each.id: bar.add_task(each.id, total=max(1, most[each.id]), open=each.open_requests)
        for each in replicas
    }
    last = ""

    def show(left: Left) -> None:
        nonlocal last
        for name, task in tasks.items():
            count = left.open_requests.get(name, 0)
            most[name] = max(most[name], count)
            total = max(1, most[name])
            bar.update(task, total=total, completed=total if not count else most[name] - count, open=count)
        line = _still_open(left)
        if not console.is_terminal and line and line != last:
            console.print(line, highlight=False, soft_wrap=True)
        last = line

    with bar:
        yield show


def said(name: str, replicas: list[Told], left: Left) -> str:
    """What has been done, and what can be done next."""
    ids = ", ".join(each.id for each in replicas)
    lines = [f"drained: {ids}"]
    if left.gone:
        lines.append(f"gone meanwhile: {', '.join(sorted(left.gone))}")
    if any(name == each.address or each.id.startswith(name) for each in replicas):
        lines.append(
            "its engine runs on, and it keeps its place in its pool. To have one replica less, lower `replicas` of the "
            "pool: Serve chooses which one stops, and that one finishes its open requests first"
        )
    else:
        lines.append(
            "Ray can be stopped there now (`ray stop`); Serve then starts as many replicas elsewhere, where there is "
            "room. One that it starts here before that takes requests again"
        )
    return "\n".join([*lines, f"`manta drain {name} --undo` takes it back"])


def undone(replicas: list[Told]) -> str:
    """As `said`, for --undo."""
    back = [each.id for each in replicas if not each.draining]
    lines = [f"takes requests again: {', '.join(back)}"] if back else []
    if not_back := [each.id for each in replicas if each.draining]:
        lines.append(f"takes none all the same, since it stops or is sick: {', '.join(not_back)}")
    return "\n".join(lines)
