"""One self-contained HTML page of one result, or of several side by side. No script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from cluster.bench import figures
from cluster.bench.document import document, table
from cluster.bench.figures import ComparedRow, number
from cluster.bench.metrics import Distribution
from cluster.bench.plots import COLOURS, Bar, Mark, Series, histogram, lines
from cluster.bench.result import BenchResult

_PLOTTED = ("ttft", "itl")


def result_page(result: BenchResult) -> str:
    body = [
        f"<h1>{escape(result.label)}</h1>",
        f'<p class="dim">{escape(_about(result))}</p>',
        '<div class="tiles">',
        *(
            f'<div class="tile"><span class="dim">{escape(figure.name)}</span><b>{escape(figure.text)}</b></div>'
            for figure in figures.summary(result.metrics)
        ),
        "</div>",
        "<h2>Latency in milliseconds</h2>",
        table(
            ["", *figures.LATENCY_COLUMNS],
            [[name, *values] for name, values in figures.latency_rows(result.metrics)],
        ),
        "<h2>Plots</h2>",
        '<div class="plots">',
        *(_histogram(result, name) for name in _PLOTTED),
        *_shared_plots([result]),
        "</div>",
        *_counts(result),
        "<h2>Configuration</h2>",
        _settings(result),
    ]
    return document(result.label, body)


def comparison_page(results: Sequence[BenchResult]) -> str:
    """The first result is the one that the others are related to."""
    names = "".join(
        f'<p><span class="key" style="background:var(--series-{index % COLOURS + 1})"></span>'
        f'<b>{escape(result.label)}</b> <span class="dim">{escape(_about(result))}</span></p>'
        for index, result in enumerate(results)
    )
    rows = [[_named(row), *_compared(row)] for row in figures.compared(results)]
    body = [
        "<h1>Benchmark comparison</h1>",
        names,
        "<h2>Plots</h2>",
        '<div class="plots">',
        *_shared_plots(results),
        "</div>",
        "<h2>Figures, with the change against the first</h2>",
        table(["", *(escape(result.label) for result in results)], rows, escaped=True),
        *(f"<h2>Configuration of {escape(each.label)}</h2>{_settings(each)}" for each in results),
    ]
    return document("Benchmark comparison", body)


def _about(result: BenchResult) -> str:
    target = result.config.get("target", {})
    said = [
        f"{target.get('model') or 'a model'} at {target.get('url', 'an endpoint')}",
        result.started.replace("T", " ").replace("+00:00", " UTC"),
        f"prompt lengths {result.lengths}",
    ]
    return "; ".join([*said, "interrupted before its end"] if result.interrupted else said)


def _histogram(result: BenchResult, name: str) -> str:
    shape, stat = result.distributions[name], figures.stat_of(result.metrics, name)
    bars = [
        Bar(shape.bin_start + place * shape.bin_width, shape.bin_start + (place + 1) * shape.bin_width, count)
        for place, count in enumerate(shape.bins)
    ]
    marks = [Mark(stat.p50, f"p50 {number(stat.p50)}"), Mark(stat.p99, f"p99 {number(stat.p99)}")]
    what = "requests" if name != "itl" else "gaps"
    return histogram(f"{figures.LATENCIES[name]}, up to p99", "ms", what, bars, marks if stat.count else ())


def _shared_plots(results: Sequence[BenchResult]) -> Iterable[str]:
    for name in _PLOTTED:
        yield lines(
            f"{figures.LATENCIES[name]}, cumulated up to p99",
            "ms",
            "%",
            [
                Series(result.label, _cumulated(result.distributions[name]), index)
                for index, result in enumerate(results)
            ],
        )
    for title, field, unit in (
        ("Output throughput", "output_tokens_per_s", "tokens/s"),
        ("Requests in flight", "in_flight", "requests"),
    ):
        series = [Series(result.label, _steps(result, field), index) for index, result in enumerate(results)]
        yield lines(f"{title} over time", "s", unit, series, filled=True)


def _cumulated(shape: Distribution) -> list[tuple[float, float]]:
    """Up to the 99th percentile, so that one straggler does not press the rest flat."""
    return [(value, float(percent)) for percent, value in enumerate(shape.curve[:100])]


def _steps(result: BenchResult, field: str) -> list[tuple[float, float]]:
    width = result.timeline.bin_s
    values: list[float] = getattr(result.timeline, field)
    edges = [(place * width, (place + 1) * width, value) for place, value in enumerate(values)]
    end = result.metrics.elapsed_s or width
    return [(min(at, end), value) for start, stop, value in edges for at in (start, stop)]


def _counts(result: BenchResult) -> Iterable[str]:
    for title, rows in figures.counts(result.metrics):
        yield f"<h2>{escape(title.capitalize())}</h2>"
        yield table(["", "count"], [[name, f"{count:,}"] for name, count in rows])


def _settings(result: BenchResult) -> str:
    machine = result.machine
    client = f"{machine.system}, {machine.cores} cores, Python {machine.python}"
    rows = [*figures.settings(result.config), ("client", client)]
    return table([], [list(row) for row in rows], kind="words")


def _named(row: ComparedRow) -> str:
    return escape(f"{row.name} ({row.unit})" if row.unit else row.name)


def _compared(row: ComparedRow) -> Iterable[str]:
    for index, value in enumerate(row.values):
        change = row.change(index)
        text = "-" if value is None else number(value)
        if change is not None:
            judged = row.higher_is_better is not None and abs(change) >= 0.005
            better = judged and (change > 0) == row.higher_is_better
            kind = "dim" if not judged else "better" if better else "worse"
            text += f' <span class="{kind}">{change:+.1%}</span>'
        yield text
