"""Plots as inline SVG. Colours are the page's CSS variables `--series-1` and so on, one set for each scheme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from cluster.bench.figures import number

COLOURS = 6
WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 40


class Series(NamedTuple):
    name: str
    points: Sequence[tuple[float, float]]
    """In ascending x."""
    colour: int = 0


class Bar(NamedTuple):
    start: float
    end: float
    value: float


class Mark(NamedTuple):
    """A line across the plot at one x."""

    at: float
    name: str


class _Scale(NamedTuple):
    """From values to places."""

    low: float
    high: float
    place_low: float
    place_high: float

    def __call__(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low)
        return round(self.place_low + part * (self.place_high - self.place_low), 2)


def lines(title: str, x_label: str, y_label: str, series: Sequence[Series], filled: bool = False) -> str:
    """One line per series; y starts at 0. `filled` tints what is below the line of a single series."""
    points = [point for each in series for point in each.points] or [(0.0, 0.0)]
    x, y = _scales([at for at, _ in points], [value for _, value in points])
    parts = []
    for each in series:
        if not each.points:
            continue
        path = "M" + "L".join(f"{x(at)} {y(value)}" for at, value in each.points)
        style = _colour(each.colour)
        if filled and len(series) == 1:
            ends = f"L{x(each.points[-1][0])} {y(0)}L{x(each.points[0][0])} {y(0)}Z"
            parts.append(f'<path class="area" style="--c:{style}" d="{path}{ends}"/>')
        name = f"<title>{escape(each.name)}</title>"
        parts.append(f'<path class="line" style="--c:{style}" d="{path}">{name}</path>')
    return _frame(title, x_label, y_label, x, y, parts)


def histogram(title: str, x_label: str, y_label: str, bars: Sequence[Bar], marks: Sequence[Mark] = ()) -> str:
    ends = [each.start for each in bars] + [each.end for each in bars] or [0.0]
    x, y = _scales(ends, [each.value for each in bars] or [0.0], from_zero=False, headroom=1.2)
    parts = []
    for bar in bars:
        if bar.value:
            left, top = x(bar.start), y(bar.value)
            width = max(0.5, round(x(bar.end) - left - 1, 2))
            says = f"{number(bar.start)} to {number(bar.end)}: {number(bar.value)}"
            box = f'x="{left}" y="{top}" width="{width}" height="{round(y(0) - top, 2)}"'
            parts.append(f'<rect class="bar" {box}><title>{says}</title></rect>')
    for row, mark in enumerate(marks):
        at = x(mark.at)
        if at <= WIDTH - RIGHT:
            anchor = "end" if at > WIDTH - 130 else "start"
            text_x = at - 4 if anchor == "end" else at + 4
            parts.append(f'<line class="mark" x1="{at}" x2="{at}" y1="{TOP}" y2="{y(0)}"/>')
            place = f'x="{text_x}" y="{TOP + 10 + 14 * row}"'
            parts.append(f'<text class="label" {place} text-anchor="{anchor}">{escape(mark.name)}</text>')
    return _frame(title, x_label, y_label, x, y, parts)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values within [low, high], at most `most` of them."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10, 20) if (high - low) / (step * factor) <= most - 1)
    first = math.ceil(low / step - 1e-9)
    return [round(place * step, 10) for place in range(first, math.floor(high / step + 1e-9) + 1)]


def _scales(
    xs: Sequence[float], ys: Sequence[float], from_zero: bool = True, headroom: float = 1.06
) -> tuple[_Scale, _Scale]:
    x_low = min(0.0, *xs) if from_zero else min(xs)
    x_high = max(xs) if max(xs) > x_low else x_low + 1
    y_high = max(ys) * headroom or 1.0
    return _Scale(x_low, x_high, LEFT, WIDTH - RIGHT), _Scale(0.0, y_high, HEIGHT - BOTTOM, TOP)


def _frame(title: str, x_label: str, y_label: str, x: _Scale, y: _Scale, parts: Sequence[str]) -> str:
    base, middle = HEIGHT - BOTTOM, (HEIGHT - BOTTOM + TOP) / 2
    grid = []
    for value in ticks(y.low, y.high):
        grid.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>')
        grid.append(f'<text x="{LEFT - 6}" y="{y(value) + 4}" text-anchor="end">{number(value)}</text>')
    for value in ticks(x.low, x.high):
        grid.append(f'<text x="{x(value)}" y="{base + 16}" text-anchor="middle">{number(value)}</text>')
    grid.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    centre = (LEFT + WIDTH - RIGHT) / 2
    labels = (
        f'<text x="{centre}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
        f'<text x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">{escape(y_label)}</text>'
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(grid)}{"".join(parts)}{labels}</svg></figure>'
    )


def _colour(index: int) -> str:
    return f"var(--series-{index % COLOURS + 1})"
