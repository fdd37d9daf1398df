"""A simulation on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cluster.simulation import figures
from cluster.simulation.simulator import OnProgress
from cluster.simulation.summary import Summary
from cluster.simulation.sweep import Axis, Point

SWEEP_COLUMNS = ("hit ratio", "TTFT mean", "TTFT p90", "ITL p90", "GPU-seconds")


def print_summaries(summaries: Sequence[Summary], console: Console) -> None:
    """One column per policy; of several, the best of each row stands out."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for summary in summaries:
        table.add_column(Text(summary.policy), justify="right", overflow="fold")
    for row in figures.rows(summaries):
        cells = (
            Text(text, style="green" if place in row.best else "") for place, text in enumerate(row.texts)
        )
        table.add_row(Text(row.name), *cells)
    console.print(table)


def sweep_cells(point: Point) -> list[str]:
    summary = point.summary
    return [
        figures.percent(summary.hit),
        figures.milliseconds(summary.ttft.mean),
        figures.milliseconds(summary.ttft.p90),
        figures.milliseconds(summary.itl.p90),
        f"{summary.gpu_seconds:,.0f}",
    ]


def print_sweep(policy: str, axes: Sequence[Axis], points: Sequence[Point], console: Console) -> None:
    ceiling = figures.percent(points[0].summary.ceiling)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    table.title = Text(f"{policy}; an endless cache hits {ceiling}", style="bold")
    for axis in axes:
        table.add_column(axis.name, justify="right")
    for name in SWEEP_COLUMNS:
        table.add_column(name, justify="right")
    for point in points:
        sizes = (axis.text(value) for axis, value in zip(axes, point.values, strict=True))
        table.add_row(*sizes, *sweep_cells(point))
    console.print(table)


@contextmanager
def progress(console: Console, requests: int, runs: int) -> Iterator[OnProgress]:
    """A bar over all runs; what it yields is called with how many requests of the present one have ended. Nothing is
    shown where there is no terminal."""
    if not console.is_terminal:
        yield lambda ended: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=requests * runs)
        done = 0
        last = 0

        def show(ended: int) -> None:
            nonlocal done, last
            # A smaller count than before is the next run's.
            done += last if ended < last else 0
            last = ended
            bar.update(task, completed=done + ended)

        yield show
