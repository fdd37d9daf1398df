"""One self-contained HTML page of one result, or of several side by side. No script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from cluster.bench import figures
from cluster.bench.figures import ComparedRow, number
from cluster.bench.metrics import Distribution
from cluster.bench.plots import COLOURS, Bar, Mark, Series, histogram, lines
from cluster.bench.result import BenchResult

_PLOTTED = ("ttft", "itl")

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --dim: #5b6470; --paper: #ffffff; --panel: #f5f7f9; --rule: #d5dae0;
  --good: #0a7a46; --bad: #b3261e;
  --series-1: #1f6feb; --series-2: #c2570c; --series-3: #0a7f5a; --series-4: #8a3ffc; --series-5: #b5175e;
  --series-6: #5f6b00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --dim: #9aa4b0; --paper: #14171b; --panel: #1d2127;
  --rule: #383f48; --good: #58c98f; --bad: #ff8a80;
  --series-1: #6ea8ff; --series-2: #ffa657; --series-3: #4fd0a5; --series-4: #c8a5ff; --series-5: #ff8fbf;
  --series-6: #d6d75a; } }
body { margin: 0 auto; padding: 28px 20px 48px; max-width: 1180px; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; overflow-wrap: anywhere; } h2 { font-size: 16px; margin: 32px 0 8px; }
p { margin: 2px 0; } .dim { color: var(--dim); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 10px; margin: 18px 0 0; }
.tile { background: var(--panel); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 20px; font-weight: 600; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 14px; }
figure { margin: 0; background: var(--panel); border-radius: 8px; padding: 10px 12px 6px; }
figcaption { font-weight: 600; font-size: 14px; } svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--dim); } .grid { stroke: var(--rule); stroke-width: 1; }
.axis { stroke: var(--dim); stroke-width: 1; } .line { fill: none; stroke: var(--c); stroke-width: 2; }
.line { stroke-linejoin: round; } .area { fill: var(--c); opacity: 0.15; } .bar { fill: var(--series-1); }
.label { paint-order: stroke; stroke: var(--panel); stroke-width: 3px; }
.mark { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 3; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 16px 4px 0; text-align: right; border-bottom: 1px solid var(--rule); vertical-align: top; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; color: var(--dim); }
table.words td { text-align: left; overflow-wrap: anywhere; }
.better { color: var(--good); } .worse { color: var(--bad); } .key { display: inline-block; width: 12px;
  height: 12px; border-radius: 3px; margin-right: 6px; }
"""


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
        _table(
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
    return _document(result.label, body)


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
        _table(["", *(escape(result.label) for result in results)], rows, escaped=True),
        *(f"<h2>Configuration of {escape(each.label)}</h2>{_settings(each)}" for each in results),
    ]
    return _document("Benchmark comparison", body)


def _document(title: str, body: Iterable[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


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
        yield _table(["", "count"], [[name, f"{count:,}"] for name, count in rows])


def _settings(result: BenchResult) -> str:
    machine = result.machine
    client = f"{machine.system}, {machine.cores} cores, Python {machine.python}"
    rows = [*figures.settings(result.config), ("client", client)]
    return _table([], [list(row) for row in rows], kind="words")


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


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], escaped: bool = False, kind: str = "") -> str:
    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(f"<{tag}>{text if escaped else escape(text)}</{tag}>" for text in texts)

    heading = f"<thead><tr>{cells('th', head)}</tr></thead>" if head else ""
    lines_ = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}">{heading}<tbody>{lines_}</tbody></table></div>'
