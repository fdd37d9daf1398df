"""`make bench-policy`: policies and other routers' rules on the same workloads, simulated; and how fast that goes.

As a rule on a part of the workloads, which takes about ten minutes on two cores; `WHOLE=1` takes hours.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import RESULTS, Report, terminal
from benchmarks.policy_runs import OURS, POLICIES, RIVALS, Run, runs, said
from benchmarks.policy_scale import MANY_REQUESTS, scale_figures
from benchmarks.policy_workloads import (
    TRACES,
    Case,
    Shapes,
    agentic_case,
    shared_prefix_case,
    trace_cases,
    trace_path,
)
from cluster.simulation.summary import Summary

SHAPES = ((8, 1000), (8, 3000), (16, 1000), (16, 3000))
BALANCE = {"conversation": 1.4, "synthetic": 1.5}
HIT_SHARE = 0.97
SAME_HIT = 0.01
OTHERS = tuple(policy for policy in POLICIES if policy != OURS)


class Size(NamedTuple):
    """How much of every workload is run."""

    hit_requests: int | None
    """Of a trace, for hit ratios; None for all of them."""
    hit_shapes: Shapes
    requests: int | None
    """Of a trace, for latencies."""
    shapes: Shapes
    shared: int
    """Requests that share prefixes."""
    turns: int
    """Of an agent's session."""
    many: int
    """Requests of the large simulation; the rest of the million is extrapolated."""


QUICK = Size(2000, SHAPES[:1], 2000, SHAPES[:1], 750, 4, 50_000)
USUAL = Size(None, (SHAPES[0], SHAPES[-1]), 4000, SHAPES[:1], 1500, 10, 100_000)
WHOLE = Size(None, SHAPES, None, SHAPES, 3000, 30, MANY_REQUESTS)


def main() -> None:
    arguments = _arguments()
    report = Report("policy")
    size = QUICK if arguments.quick else WHOLE if arguments.whole else USUAL
    if arguments.part in (None, 1):
        hit_figures(report, size.hit_requests, size.hit_shapes)
    if arguments.part in (None, 2):
        latency_figures(report, _cases(size))
    if arguments.part in (None, 3):
        scale_figures(report, size.many)
    # A part of it is no result to keep.
    folder = Path(tempfile.gettempdir()) if arguments.quick or arguments.part else RESULTS
    sys.exit(report.finish(terminal(), folder))


def hit_figures(report: Report, requests: int | None, shapes: Shapes) -> None:
    """At the traces' own speed: what is hit of what could be, and how evenly the work is shared out."""
    for name in _traces(report):
        cases = [case._replace(loads=(0.0,)) for case in trace_cases(name, shapes, requests)]
        done = _all([case for case in cases if case.config.tiers.dram], (OURS,))
        done += _all(
            [case for case in cases if not case.config.tiers.dram],
            (OURS, "prefix_affinity", "round_robin", *RIVALS),
        )
        for case in cases:
            by_policy = {run.policy: run.summary for run in done if run.case == case.name}
            ours = by_policy[OURS]
            if case.config.tiers.dram:
                report.add(
                    f"hit ratio, {case.name}", 100 * ours.hit, "%", f"an endless cache: {100 * ours.ceiling:.1f} %",
                    f">= {100 * HIT_SHARE:g} % of that", ours.hit >= HIT_SHARE * ours.ceiling,
                )  # fmt: skip
                continue
            limit, busiest = BALANCE[name], ours.balance_p99 or float("inf")
            report.at_most(
                f"busiest/mean, sliding minute p99, {case.name}", busiest, "", limit, _balances(by_policy)
            )
            best = max(by_policy, key=lambda policy: by_policy[policy].hit)
            most = f"best, {best}: {100 * by_policy[best].hit:.1f} %"
            report.add(
                f"local hit ratio, {case.name}", 100 * ours.hit, "%", most,
                f"within {100 * SAME_HIT:g} points", ours.hit >= by_policy[best].hit - SAME_HIT,
            )  # fmt: skip


def latency_figures(report: Report, cases: Sequence[Case]) -> None:
    """TTFT beside every other policy, at every load of every workload."""
    done = _all(cases, POLICIES)
    for case in cases:
        for load in case.loads:
            here = {run.policy: run.summary.ttft for run in done if (run.case, run.load) == (case.name, load)}
            where = f"{case.name}, {load:g} sessions" if load > 1 else f"{case.name}, {load:.0%}"
            for figure in ("mean", "p90"):
                values = {policy: float(getattr(spread, figure)) for policy, spread in here.items()}
                best = min(OTHERS, key=lambda policy: values[policy])
                report.add(
                    f"TTFT {figure}, {where}", 1000 * values[OURS], "ms", _others(values, best), "< every other policy",
                    values[OURS] < values[best],
                )  # fmt: skip


def _others(values: dict[str, float], best: str) -> str:
    rest = ", ".join(f"{policy} {1000 * values[policy]:.0f}" for policy in OTHERS if policy != best)
    return f"best {best}: {1000 * values[best]:.0f} ms; {rest}"


def _balances(by_policy: dict[str, Summary]) -> str:
    return "; ".join(
        f"{policy}: {summary.balance_p99 or 0:.2f} at {100 * summary.hit:.1f} %"
        for policy, summary in by_policy.items()
        if policy != OURS
    )


def _cases(size: Size) -> list[Case]:
    cases = [shared_prefix_case(size.shared)]
    for name in TRACES:
        if trace_path(name).is_file():
            cases += trace_cases(name, size.shapes, size.requests)
    return [*cases, agentic_case(store=False, turns=size.turns), agentic_case(store=True, turns=size.turns)]


def _traces(report: Report) -> Iterable[str]:
    for name in TRACES:
        if trace_path(name).is_file():
            yield name
        else:
            report.skipped(f"{name} trace", "", f"not found: {trace_path(name)}; set TRACES to its folder")


def _all(cases: Sequence[Case], policies: Sequence[str]) -> list[Run]:
    done = []
    for run in runs(cases, policies):
        said(run)
        done.append(run)
    return done


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=int, choices=(1, 2, 3), help="only this one")
    parser.add_argument("--quick", action="store_true", help="little of each workload, to see that all runs")
    parser.add_argument(
        "--whole",
        action="store_true",
        default=os.environ.get("WHOLE") == "1",
        help="all of each workload, hours (or WHOLE=1)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
