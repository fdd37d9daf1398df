"""A question to the simulator: which load, on what, by which policies, with which sizes; and its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from pydantic import ValidationError
from rich.console import Console

from cluster.simulation.ceiling import all_requests, ceiling
from cluster.simulation.config import (
    SimulationConfig,
    SimulationConfigError,
    load_fields,
    simulation_config,
)
from cluster.simulation.engine_times import MeasurementError, read_measured
from cluster.simulation.generators import made
from cluster.simulation.page import summaries_page, sweep_page
from cluster.simulation.simulator import OnProgress, Simulator
from cluster.simulation.summary import Summary, summarise
from cluster.simulation.sweep import Axis, Point, configurations, parse_axes
from cluster.simulation.tables import print_summaries, print_sweep
from cluster.simulation.workload import TraceError, Workload, read_trace
from router.policies import PolicyError, policy_from


class Refused(ValueError):
    """A question that can't be answered as asked. The message says where, what was found and what is needed."""


class Answer(NamedTuple):
    title: str
    settings: list[tuple[str, str]]
    axes: tuple[Axis, ...]
    points: dict[str, list[Point]]
    """By policy; a single one without axes."""

    @property
    def summaries(self) -> list[Summary]:
        return [point.summary for swept in self.points.values() for point in swept]

    def print(self, console: Console) -> None:
        if not self.axes:
            print_summaries(self.summaries, console)
        for policy, swept in self.points.items() if self.axes else ():
            print_sweep(policy, self.axes, swept, console)

    def to_json(self) -> str:
        """A list with an object for each run: the swept sizes and the fields of its summary."""
        runs = [
            {axis.name: value for axis, value in zip(self.axes, point.values, strict=True)}
            | msgspec.to_builtins(point.summary)
            for swept in self.points.values()
            for point in swept
        ]
        return msgspec.json.format(msgspec.json.encode(runs)).decode()

    def to_html(self) -> str:
        if self.axes:
            return sweep_page(self.title, self.settings, self.axes, dict(self.points))
        return summaries_page(self.title, self.settings, self.summaries)


class Study(NamedTuple):
    title: str
    config: SimulationConfig
    workload: Workload
    policies: list[str]
    axes: tuple[Axis, ...]
    variants: list[tuple[tuple[int, ...], SimulationConfig]]
    """Sizes, one per axis, and the configuration with them."""
    ceiling: float

    @property
    def requests(self) -> int:
        """Of one run."""
        return self.workload.requests

    @property
    def runs(self) -> int:
        return len(self.policies) * len(self.variants)

    def run(self, on_progress: OnProgress) -> Answer:
        points = {
            kind: [
                Point(values, self._summary(config, kind, on_progress)) for values, config in self.variants
            ]
            for kind in self.policies
        }
        settings = list(_flat("", self.config.model_dump(mode="json")))
        return Answer(self.title, settings, self.axes, points)

    def _summary(self, config: SimulationConfig, kind: str, on_progress: OnProgress) -> Summary:
        policy = config.policy.model_copy(update={"kind": kind})
        chosen = config.model_copy(update={"policy": policy})
        run = Simulator(chosen, self.workload, on_progress=on_progress).run()
        return summarise(kind, chosen, self.ceiling, run)


def ask(
    trace: Path | None,
    config_file: Path | None,
    policies: Sequence[str],
    sweeps: Sequence[str],
    limit: int | None = None,
) -> Study:
    """All input is read and checked here. Raises Refused."""
    try:
        config = _config(config_file)
        for kind in policies:
            chosen = simulation_config({"policy": {"kind": kind}}, "--policy")
            policy_from(chosen.policy)
        policy_from(config.policy)
        axes = parse_axes(sweeps)
        variants = list(configurations(config, axes))
        workload = _workload(config, trace, limit)
    except (SimulationConfigError, MeasurementError, TraceError, PolicyError) as error:
        raise Refused(str(error)) from error
    except ValidationError as error:
        found = error.errors()[0]
        raise Refused(f"--sweep: {found['loc'][-1]} is {found['input']!r}: {found['msg']}") from error
    kinds = list(dict.fromkeys(policies or [config.policy.kind]))
    most = ceiling(all_requests(workload), config.chunk_tokens)
    said = trace.name if trace is not None else f"{config.load.kind if config.load is not None else ''} load"
    title = f"Simulation of {said}: {workload.requests:,} requests"
    return Study(title, config, workload, kinds, axes, variants, most)


def _config(path: Path | None) -> SimulationConfig:
    if path is None:
        return SimulationConfig()
    config = simulation_config(load_fields(path), str(path))
    if config.measured is None:
        return config
    measured = read_measured(path.parent / config.measured, config.engine, config.tiers)
    return config.model_copy(update={"engine": measured.engine, "tiers": measured.tiers})


def _workload(config: SimulationConfig, trace: Path | None, limit: int | None) -> Workload:
    if trace is not None:
        read = read_trace(trace, config.time_scale, config.chunk_tokens)
        return read if limit is None else read.first(limit)
    if config.load is None:
        raise SimulationConfigError(
            "found nothing to simulate; needed: --trace FILE, or load in --config FILE"
        )
    if limit is not None:
        raise SimulationConfigError("--limit: needed: --trace FILE beside it")
    return made(config.load, config.chunk_tokens, config.seed)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Settings by their dotted names."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _flat(f"{name}.{key}" if name else key, below)
    else:
        yield name, str(value)
