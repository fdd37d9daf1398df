"""A capacity question: the same load with tiers of several sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cluster.simulation.config import SimulationConfig, SimulationConfigError
from cluster.simulation.sizes import parse_size, size_text
from cluster.simulation.summary import Summary

SIZED = ("dram", "disk", "remote")
COUNTED = ("replicas", "blocks")
MOST_POINTS = 1000


class Axis(NamedTuple):
    """One quantity and the values it is given, ascending."""

    name: str
    values: tuple[int, ...]

    def text(self, value: int) -> str:
        return size_text(value) if self.name in SIZED else f"{value:,}"


class Point(NamedTuple):
    """What one choice of sizes leads to."""

    values: tuple[int, ...]
    """One per axis."""
    summary: Summary


def parse_axes(texts: Sequence[str]) -> tuple[Axis, ...]:
    """`["dram=0,64GiB", "disk=0,1TiB"]`. Raises SimulationConfigError."""
    axes = tuple(_axis(text) for text in texts)
    names = [axis.name for axis in axes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SimulationConfigError(
            f"--sweep: {', '.join(twice)} is given twice; needed: once, with all values"
        )
    points = 1
    for axis in axes:
        points *= len(axis.values)
    if points > MOST_POINTS:
        raise SimulationConfigError(f"--sweep: {points:,} combinations; needed: {MOST_POINTS:,} at most")
    return axes


def _axis(text: str) -> Axis:
    name, equals, values = text.partition("=")
    known = (*SIZED, *COUNTED)
    if not equals or name not in known:
        raise SimulationConfigError(
            f"--sweep: found {text!r}; needed: NAME=VALUE,VALUE,... with one of {', '.join(known)}"
        )
    try:
        if name in SIZED:
            found = {parse_size(value) for value in values.split(",")}
        else:
            found = {int(value) for value in values.split(",")}
    except ValueError as error:
        raise SimulationConfigError(f"--sweep: {name}: {error}") from error
    return Axis(name, tuple(sorted(found)))


def configurations(
    config: SimulationConfig, axes: Sequence[Axis]
) -> Iterable[tuple[tuple[int, ...], SimulationConfig]]:
    """Every combination, the last axis changing fastest. Raises ValidationError for values that don't fit."""
    for values in itertools.product(*(axis.values for axis in axes)):
        chosen = dict(zip((axis.name for axis in axes), values, strict=True))
        fields = config.model_dump()
        fields["tiers"] |= {name: value for name, value in chosen.items() if name in SIZED}
        fields |= {name: value for name, value in chosen.items() if name in COUNTED}
        yield values, SimulationConfig.model_validate(fields)
