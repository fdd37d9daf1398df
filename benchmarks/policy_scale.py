"""How fast simulations go, and in how much memory: each in a process of its own, on one core."""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.harness import Report
from benchmarks.policy_workloads import CHUNK_TOKENS, trace_cases, trace_path
from cluster.simulation.config import SharedPrefixLoad, SimulationConfig
from cluster.simulation.generators import SharedPrefix
from cluster.simulation.simulator import Simulator
from cluster.simulation.workload import Request, Workload

TRACE_LIMIT_S = 10.0
MANY_REPLICAS = 1000
MANY_REQUESTS = 1_000_000
MANY_LIMIT_S = 900.0
MANY_LIMIT_GIB = 4.0
WARM_PART = 0.6
"""Of a part of the large run, what fills the caches: after that every request costs the same."""


class Cost(NamedTuple):
    cpu_s: float
    peak_gib: float


class _Timed(Workload):
    """Another workload, and the CPU time when part of its requests had come."""

    def __init__(self, workload: Workload, part: float) -> None:
        self._workload, self.requests = workload, workload.requests
        self.first = int(part * workload.requests)
        self.cpu_s = 0.0

    def arrivals(self) -> Iterator[Request]:
        for number, request in enumerate(self._workload.arrivals()):
            if number == self.first:
                self.cpu_s = time.process_time()
            yield request


def scale_figures(report: Report, requests: int) -> None:
    """`requests`: how many of the large simulation are run."""
    if trace_path("conversation").is_file():
        cost = _apart(_trace_cost)
        report.at_most(
            "12,031 requests on 8 replicas, conversation trace", cost.cpu_s, "s", TRACE_LIMIT_S, "CPU time"
        )
    cost = _apart(_many_cost, requests)
    part = requests < MANY_REQUESTS
    said = f"{requests:,} were run, the rest extrapolated; CPU time" if part else "CPU time"
    name = f"{MANY_REQUESTS:,} requests on {MANY_REPLICAS:,} replicas"
    report.at_most(name, cost.cpu_s, "s", MANY_LIMIT_S, said)
    if part:
        name = f"{requests:,} requests on {MANY_REPLICAS:,} replicas"
    report.at_most(f"{name}, memory", cost.peak_gib, "GiB", MANY_LIMIT_GIB)


def _apart(work: object, *arguments: object) -> Cost:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        cost: Cost = pool.apply(work, arguments)  # type: ignore[arg-type]
        return cost


def _trace_cost() -> Cost:
    case = trace_cases("conversation", ((8, 1000),))[0]
    workload = case.workload(0.5)
    began = time.process_time()
    Simulator(case.config, workload).run()
    return _cost(time.process_time() - began)


def many(requests: int) -> tuple[SimulationConfig, Workload]:
    """20,000 groups that share 12 chunks of a prompt of 17, at 60 % of what the replicas can do."""
    load = SharedPrefixLoad(
        groups=20_000, users=5, prefix_tokens=6144, suffix_tokens=2600, output_tokens=200, rate=2500.0,
        requests=requests,
    )  # fmt: skip
    config = SimulationConfig(replicas=MANY_REPLICAS, blocks=1000)
    return config, SharedPrefix(load, CHUNK_TOKENS, 0)


def _many_cost(requests: int) -> Cost:
    config, workload = many(requests)
    timed = _Timed(workload, WARM_PART)
    began = time.process_time()
    Simulator(config, timed).run()
    ended = time.process_time()
    if requests == MANY_REQUESTS:
        return _cost(ended - began)
    each = (ended - timed.cpu_s) / (requests - timed.first)
    return _cost(timed.cpu_s - began + each * (MANY_REQUESTS - timed.first))


def _cost(cpu_s: float) -> Cost:
    return Cost(cpu_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
