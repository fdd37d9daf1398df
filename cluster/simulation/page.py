"""A simulation as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from cluster.bench.document import document, table
from cluster.bench.plots import COLOURS, Series, lines
from cluster.simulation import figures
from cluster.simulation.records import SOURCES
from cluster.simulation.summary import Summary
from cluster.simulation.sweep import Axis, Point
from cluster.simulation.tables import SWEEP_COLUMNS, sweep_cells

Curve = Sequence[tuple[float, float]]


def summaries_page(title: str, settings: Sequence[tuple[str, str]], summaries: Sequence[Summary]) -> str:
    body = [
        f"<h1>{escape(title)}</h1>",
        *_names([summary.policy for summary in summaries]),
        "<h2>Plots</h2>",
        '<div class="plots">',
        *_plots(summaries),
        "</div>",
        "<h2>Figures</h2>",
        table(["", *(escape(summary.policy) for summary in summaries)], list(_rows(summaries)), escaped=True),
        "<h2>Configuration</h2>",
        table([], [list(row) for row in settings], kind="words"),
    ]
    return document(title, body)


def sweep_page(
    title: str,
    settings: Sequence[tuple[str, str]],
    axes: Sequence[Axis],
    points: dict[str, Sequence[Point]],
) -> str:
    """`points` by policy."""
    body = [f"<h1>{escape(title)}</h1>"]
    for policy, swept in points.items():
        body += [f"<h2>{escape(policy)}</h2>", '<div class="plots">', *_sweep_plots(axes, swept), "</div>"]
        head = [*(axis.name for axis in axes), *SWEEP_COLUMNS]
        body.append(table(head, [[*_sizes(axes, point), *sweep_cells(point)] for point in swept]))
    body += ["<h2>Configuration</h2>", table([], [list(row) for row in settings], kind="words")]
    return document(title, body)


def _names(names: Sequence[str]) -> Iterable[str]:
    for index, name in enumerate(names):
        colour = f"var(--series-{index % COLOURS + 1})"
        yield f'<p><span class="key" style="background:{colour}"></span><b>{escape(name)}</b></p>'


def _plots(summaries: Sequence[Summary]) -> Iterable[str]:
    def series(of: Callable[[Summary], Curve]) -> list[Series]:
        return [Series(each.policy, of(each), index) for index, each in enumerate(summaries)]

    yield lines("TTFT, cumulated up to p99", "ms", "%", series(_cumulated))
    yield lines("Prompt tokens from a cache over time", "s", "%", series(lambda each: each.hit_curve))
    yield lines("Requests open over time", "s", "requests", series(lambda each: each.flight_curve))
    yield lines(
        "Busiest replica over the mean, sliding minute", "s", "times", series(lambda each: each.balance_curve)
    )
    yield lines("Where prompt tokens came from", "tier, in the order of the figures", "%", series(_by_source))


def _cumulated(summary: Summary) -> Curve:
    return [(1000 * seconds, float(part)) for part, seconds in enumerate(summary.ttft_curve)]


def _by_source(summary: Summary) -> Curve:
    """Cumulated from the fastest tier on, so that the last point is the hit ratio."""
    upto, points = 0.0, []
    for place, source in enumerate(SOURCES, 1):
        upto += 100 * summary.hits[source]
        points.append((float(place), upto))
    return points


def _rows(summaries: Sequence[Summary]) -> Iterable[list[str]]:
    for row in figures.rows(summaries):
        cells = [
            f'<span class="better">{escape(text)}</span>' if place in row.best else escape(text)
            for place, text in enumerate(row.texts)
        ]
        yield [escape(row.name), *cells]


def _sizes(axes: Sequence[Axis], point: Point) -> list[str]:
    return [axis.text(value) for axis, value in zip(axes, point.values, strict=True)]


def _sweep_plots(axes: Sequence[Axis], points: Sequence[Point]) -> Iterable[str]:
    """Along the first axis, a line for each combination of the others."""
    named: dict[tuple[int, ...], list[Point]] = {}
    for point in points:
        named.setdefault(point.values[1:], []).append(point)
    kinds: tuple[tuple[str, str, Callable[[Summary], float]], ...] = (
        ("Hit ratio", "%", lambda summary: 100 * summary.hit),
        ("Mean TTFT", "ms", lambda summary: 1000 * summary.ttft.mean),
    )
    for title, unit, of in kinds:
        series = []
        for index, (others, along) in enumerate(named.items()):
            name = ", ".join(
                f"{axis.name} {axis.text(value)}" for axis, value in zip(axes[1:], others, strict=True)
            )
            curve = [(_scaled(axes[0], point.values[0]), of(point.summary)) for point in along]
            series.append(Series(name, curve, index))
        yield lines(f"{title} by {axes[0].name}", _unit(axes[0]), unit, series)
        yield from _names([each.name for each in series] if axes[1:] else [])


def _unit(axis: Axis) -> str:
    return "GiB" if axis.name in ("dram", "disk", "remote") else axis.name


def _scaled(axis: Axis, value: int) -> float:
    return value / 2**30 if _unit(axis) == "GiB" else float(value)
