"""What every benchmark shares: figures with targets, the table and file they end in, repeats, intervals, CPU time.

A figure whose comparison is undecided does not hold. `STRICT=1` makes a benchmark exit 1 when one does not.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"
RESAMPLES = 2000

T = TypeVar("T")


@dataclass(frozen=True)
class Figure:
    """One number, and what was asked of it."""

    figure: str
    value: float | None
    """None where it could not be measured; `against` then says why."""
    unit: str
    against: str = ""
    """What the value is compared with, with its own value where that was measured in the same run."""
    target: str = ""
    """Empty where nothing is asked."""
    holds: bool | None = None
    """None without a target, and where the optional peer that the target speaks of is not installed."""


@dataclass
class Report:
    """The figures of one benchmark."""

    name: str
    figures: list[Figure] = field(default_factory=list)

    def add(
        self,
        figure: str,
        value: float | None,
        unit: str,
        against: str = "",
        target: str = "",
        holds: bool | None = None,
    ) -> None:
        self.figures.append(Figure(figure, value, unit, against, target, holds))

    def at_most(self, figure: str, value: float, unit: str, limit: float, against: str = "") -> None:
        """A figure that holds below a fixed limit."""
        self.add(figure, value, unit, against, f"< {limit:g} {unit}", value < limit)

    def less_than(self, figure: str, value: float, unit: str, peer: str, theirs: float | None) -> None:
        """A figure that holds below a peer's, measured in the same run; no verdict where the peer is missing."""
        if theirs is None:
            self.add(figure, value, unit, f"{peer}: not measured", f"< {peer}")
        else:
            self.add(figure, value, unit, f"{peer}: {_number(theirs)} {unit}", f"< {peer}", value < theirs)

    def skipped(self, figure: str, unit: str, reason: str, target: str = "") -> None:
        self.add(figure, None, unit, reason, target)

    @property
    def failed(self) -> list[Figure]:
        return [figure for figure in self.figures if figure.holds is False]

    def as_json(self) -> dict[str, Any]:
        return {"machine": machine(), "figures": [asdict(figure) for figure in self.figures]}

    def finish(self, console: Console | None = None, folder: Path = RESULTS) -> int:
        """Print the table, write `NAME.json`, and return what the process should exit with."""
        console = console or terminal()
        console.print(_table(self))
        console.print(machine(), highlight=False, soft_wrap=True)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        console.print(f"written to {os.path.relpath(path)}", highlight=False, soft_wrap=True)
        if self.failed:
            console.print(f"{len(self.failed)} of {len(self.figures)} figures do not hold", highlight=False)
        return 1 if self.failed and strict() else 0


def terminal() -> Console:
    """Where a benchmark prints; in a pipe wide enough for a table's rows to stay lines."""
    return Console(width=None if os.isatty(1) else 180)


def strict() -> bool:
    """Whether a figure that does not hold is a failure."""
    return os.environ.get("STRICT") == "1"


def machine() -> str:
    """What the figures were measured on, and how busy it was."""
    memory = psutil.virtual_memory().total / 2**30
    load = os.getloadavg()[0]
    return (
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, load {load:.1f}"
    )


class Interval(NamedTuple):
    """A 95 % interval of a mean."""

    mean: float
    low: float
    high: float

    def below(self, limit: float) -> bool:
        """Whether even the interval's upper end is. What is undecided is not."""
        return self.high < limit


def interval(samples: Sequence[float], seed: int = 0) -> Interval:
    """95 % interval of the mean: Student's t up to 30 samples, a bootstrap for more.

    With fewer than two samples nothing is known: the interval is infinite.
    """
    n = len(samples)
    if not n:
        return Interval(math.nan, -math.inf, math.inf)
    mean = statistics.fmean(samples)
    if n == 1:
        return Interval(mean, -math.inf, math.inf)
    if n <= len(_T95) + 1:
        half = _T95[n - 2] * statistics.stdev(samples) / math.sqrt(n)
        return Interval(mean, mean - half, mean + half)
    draw = random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(samples, k=n)) for _ in range(RESAMPLES))
    return Interval(mean, means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1])


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """`ours - theirs`, round by round. Raises ValueError where the rounds do not pair."""
    return interval([a - b for a, b in zip(ours, theirs, strict=True)])


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """`ours / theirs`, round by round: the geometric mean, since a ratio's spread is one of factors.

    Raises ValueError where the rounds do not pair or a value is not positive.
    """
    if min((*ours, *theirs), default=1.0) <= 0:
        raise ValueError(f"a ratio needs positive values; found {min((*ours, *theirs))}")
    logs = interval([math.log(a / b) for a, b in zip(ours, theirs, strict=True)])
    return Interval(*(math.exp(value) if value < 700 else math.inf for value in logs))


def interleaved(
    systems: Mapping[str, Callable[[], T]],
    rounds: int,
    on_round: Callable[[int, str], None] = lambda number, name: None,
) -> dict[str, list[T]]:
    """Measure every system once a round, beginning with another one each time: what drifts, drifts for all."""
    names = list(systems)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            on_round(number, name)
            found[name].append(systems[name]())
    return found


def timed(work: Callable[[], object], repeats: int, warmup: int = 1) -> list[float]:
    """Seconds of each call."""
    for _ in range(warmup):
        work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def percentile(samples: Sequence[float], part: float) -> float:
    """Nearest rank. `part`: 0 to 1."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def cpu_seconds(pid: int, tree: bool = True) -> float:
    """User and system seconds so far of a process, and of all that descends from it.

    What a child had used before it ended counts once its parent has waited for it. 0 for a process that is gone.
    """
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in [top, *(top.children(recursive=True) if tree else ())]:
            with suppress(psutil.NoSuchProcess):
                used = process.cpu_times()
                total += used.user + used.system
                total += used.children_user + used.children_system if tree else 0.0
    return total


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _table(report: Report) -> Table:
    table = Table(title=f"bench-{report.name}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for column in ("unit", "against", "target", "holds"):
        table.add_column(column)
    verdicts = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}
    for each in report.figures:
        value = "-" if each.value is None else _number(each.value)
        table.add_row(each.figure, value, each.unit, each.against, each.target, verdicts[each.holds])
    return table


def _number(value: float) -> str:
    """Three digits that count; large numbers whole."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip
"""Student's t at 97.5 % for 1, 2, ... degrees of freedom."""
