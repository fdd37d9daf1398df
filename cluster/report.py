"""Findings and replicas for a person: colour on a terminal, plain lines in a pipe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.check import Finding
from cluster.status import Status

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def print_findings(findings: Sequence[Finding], stderr: bool = False) -> None:
    """One line each; a pipe gets them unbroken, however long."""
    console = Console(stderr=stderr, soft_wrap=True, highlight=False)
    width = max((len(finding.subject) for finding in findings), default=0)
    for finding in findings:
        line = Text(f"{finding.level:<8}", style=STYLES[finding.level])
        console.print(line + Text(f"{finding.subject:<{width}}  {finding.message}", style="default"))


def print_replicas(status: Status) -> None:
    console = Console(highlight=False)
    answer = status.answer
    routers = (
        f", {len(answer.routers)} router{'s' if len(answer.routers) != 1 else ''}" if answer.routers else ""
    )
    console.print(f"{answer.endpoint}  {'ready' if answer.ready else 'not ready'}{routers}", soft_wrap=True)
    if status.problem:
        console.print(status.problem, soft_wrap=True, markup=False)
    if not answer.replicas:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("replica", "role", "state", "node", "address"):
        table.add_column(heading, overflow="fold")
    for heading in ("waiting", "running", "kv"):
        table.add_column(heading, justify="right")
    for each in answer.replicas:
        load = (str(each.waiting), str(each.running), f"{each.kv_used:.0%}")
        table.add_row(each.id, each.role, each.state, each.node[:8], each.address, *load)
    console.print(table)
