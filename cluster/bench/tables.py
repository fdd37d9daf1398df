"""A result on the terminal, and the bar of a run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cluster.bench import runner
from cluster.bench.figures import (
    LATENCY_COLUMNS,
    ComparedRow,
    compared,
    counts,
    latency_rows,
    number,
    summary,
)
from cluster.bench.result import BenchResult

_REFRESH_S = 0.25
_RATE_WINDOW_S = 2.0
_MOST_ERRORS = 5


def print_result(result: BenchResult, console: Console) -> None:
    title = f"{result.label}{', interrupted' if result.interrupted else ''}"
    console.print(Text(title, style="bold"))
    figures = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    figures.add_column()
    figures.add_column(justify="right")
    for figure in summary(result.metrics):
        figures.add_row(figure.name, figure.text)
    console.print(figures)
    latencies = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    latencies.add_column("ms")
    for column in LATENCY_COLUMNS:
        latencies.add_column(column, justify="right")
    for name, values in latency_rows(result.metrics):
        latencies.add_row(name, *values)
    console.print()
    console.print(latencies)
    for name, rows in counts(result.metrics):
        console.print(
            Text(f"{name}: " + ", ".join(f"{what} {count:,}" for what, count in rows)), soft_wrap=True
        )
    console.print(Text(f"prompt lengths: {result.lengths}", style="dim"))


def print_errors(errors: Sequence[str], console: Console) -> None:
    """The first few different ones."""
    for error in list(dict.fromkeys(errors))[:_MOST_ERRORS]:
        console.print(Text(error, style="red"), soft_wrap=True)


def print_comparison(results: Sequence[BenchResult], console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for result in results:
        table.add_column(result.label, justify="right", overflow="fold")
    for row in compared(results):
        table.add_row(f"{row.name} ({row.unit})" if row.unit else row.name, *_cells(row))
    console.print(table)


def _cells(row: ComparedRow) -> list[Text]:
    cells = []
    for index, value in enumerate(row.values):
        cell = Text("-" if value is None else number(value))
        change = row.change(index)
        if change is not None:
            better = row.higher_is_better is not None and (change > 0) == row.higher_is_better
            neutral = row.higher_is_better is None or abs(change) < 0.005
            cell.append(f" {change:+.1%}", style="dim" if neutral else "green" if better else "red")
        cells.append(cell)
    return cells


@contextlib.asynccontextmanager
async def shown(progress: runner.Progress, title: str, console: Console) -> AsyncIterator[None]:
    """A bar with the live throughput while the block runs; nothing where there is no terminal."""
    if not console.is_terminal:
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TextColumn("{task.fields[live]}"), console=console, auto_refresh=False)
    with bar:
        task = bar.add_task(title, total=progress.requests, live="")

        async def refresh() -> None:
            seen = [(time.monotonic(), 0)]
            while True:
                await asyncio.sleep(_REFRESH_S)
                seen = [each for each in seen if seen[-1][0] - each[0] <= _RATE_WINDOW_S]
                seen.append((time.monotonic(), progress.chunks))
                (began, before), (now, chunks) = seen[0], seen[-1]
                rate = (chunks - before) / (now - began)
                failed = f", {progress.failed} failed" if progress.failed else ""
                live = f"{rate:,.0f} tok/s, {progress.running} running{failed}"
                bar.update(task, completed=progress.finished, live=live, refresh=True)

        refresher = asyncio.create_task(refresh())
        try:
            yield
        finally:
            refresher.cancel()
            bar.update(task, completed=progress.finished, live="", refresh=True)
