"""Simulations of policies on workloads, one process each, as many at a time as there are cores."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks.policy_rivals import ConsistentHash, OverlapPlusLoad, RayPrefixAffinity, WeightedScores
from benchmarks.policy_workloads import CHUNK_TOKENS, Case
from cluster.simulation.ceiling import all_requests, ceiling
from cluster.simulation.config import SimulationConfig
from cluster.simulation.router_view import ByPolicy, Decider
from cluster.simulation.simulator import Simulator
from cluster.simulation.summary import Summary, summarise
from router.config import PolicyConfig
from router.policies import policy_from

OURS = "predicted_ttft"
OWN = (OURS, "prefix_affinity", "least_loaded", "round_robin", "session")
RIVALS: dict[str, Callable[[SimulationConfig], Decider]] = {
    "ray_prefix": lambda config: RayPrefixAffinity(CHUNK_TOKENS),
    "hash_bounded": lambda config: ConsistentHash(),
    "overlap_load": lambda config: OverlapPlusLoad(config.blocks, CHUNK_TOKENS),
    "weighted_scores": lambda config: WeightedScores(),
}
POLICIES = (*OWN, *RIVALS)


class Run(NamedTuple):
    case: str
    load: float
    policy: str
    summary: Summary
    cpu_s: float


class _Task(NamedTuple):
    case: int
    load: float
    policy: str


def runs(cases: Sequence[Case], policies: Sequence[str] = POLICIES) -> Iterator[Run]:
    """Every policy at every load of every case, as they are done."""
    tasks = [
        _Task(place, load, policy)
        for place, case in enumerate(cases)
        for load in case.loads
        for policy in policies
    ]
    # Forked, so that the cases need not be sent: they hold functions.
    global _cases
    _cases = cases
    jobs = int(os.environ.get("JOBS", len(os.sched_getaffinity(0))))
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=8) as pool:
        yield from pool.imap_unordered(_run, tasks)


_cases: Sequence[Case] = ()


def _run(task: _Task) -> Run:
    case = _cases[task.case]
    return simulate(case, task.load, task.policy)


def simulate(case: Case, load: float, policy: str) -> Run:
    workload = case.workload(load)
    decider = decider_of(policy, case.config)
    began = time.process_time()
    outcome = Simulator(case.config, workload, decider).run()
    cpu_s = time.process_time() - began
    most = ceiling(all_requests(workload), CHUNK_TOKENS)
    return Run(case.name, load, policy, summarise(policy, case.config, most, outcome), cpu_s)


def decider_of(policy: str, config: SimulationConfig) -> Decider:
    if policy in RIVALS:
        return RIVALS[policy](config)
    return ByPolicy(policy_from(PolicyConfig(kind=policy)))


def said(run: Run) -> None:
    """One line on standard error as it is done."""
    each = run.summary
    print(
        f"{run.case} at {run.load:g}, {run.policy}: TTFT mean {each.ttft.mean:.3f} p90 {each.ttft.p90:.3f} s, hit "
        f"{each.hit:.3f} of {each.ceiling:.3f} (own {each.hits['hbm']:.3f}), busiest/mean p99 "
        f"{each.balance_p99 or 0:.2f}, {run.cpu_s:.1f} s CPU",
        file=sys.stderr,
        flush=True,
    )
