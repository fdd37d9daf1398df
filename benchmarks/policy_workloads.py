"""What policies are compared on: traces, groups that share a prefix, sessions of agents; and how much is 100 %."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from cluster.simulation.ceiling import all_requests
from cluster.simulation.config import (
    AgenticLoad,
    EngineTimes,
    SharedPrefixLoad,
    SimulationConfig,
    TiersConfig,
)
from cluster.simulation.engine_times import prefill_s
from cluster.simulation.generators import made
from cluster.simulation.workload import Workload, read_trace

CHUNK_TOKENS = 512
STORE_BLOCKS = 50_000
LOADS = (0.5, 0.8, 1.0)
TRACES = ("conversation", "synthetic")
SESSIONS = (75, 225, 375)
Shapes = Sequence[tuple[int, int]]
"""Replicas and blocks of each."""


class Case(NamedTuple):
    """One workload on one cluster."""

    name: str
    config: SimulationConfig
    loads: tuple[float, ...]
    """Parts of the capacity; for sessions their number."""
    workload: Callable[[float], Workload]
    """At a load."""


def trace_path(name: str) -> Path:
    """In `$TRACES`, or in the folder `shared/traces` beside the repository."""
    folder = Path(os.environ.get("TRACES", Path(__file__).resolve().parents[2] / "shared" / "traces"))
    return folder / f"mooncake_{name}.jsonl"


def cluster(replicas: int, blocks: int, store: bool, replicas_per_node: int = 8) -> SimulationConfig:
    """`store`: 50,000 chunks in the nodes' memory together."""
    nodes = -(-replicas // replicas_per_node)
    chunk_bytes = CHUNK_TOKENS * EngineTimes().kv_bytes_per_token
    tiers = TiersConfig(dram=STORE_BLOCKS // nodes * chunk_bytes if store else 0)
    return SimulationConfig(
        replicas=replicas, replicas_per_node=replicas_per_node, blocks=blocks, tiers=tiers
    )


def trace_cases(name: str, shapes: Shapes, requests: int | None = None) -> list[Case]:
    """Every shape without and with a store."""
    return [
        _trace_case(name, cluster(replicas, blocks, store), f"{replicas} x {blocks:,}", store, requests)
        for replicas, blocks in shapes
        for store in (False, True)
    ]


def _trace_case(name: str, config: SimulationConfig, shape: str, store: bool, requests: int | None) -> Case:
    def workload(load: float) -> Workload:
        """At the trace's own speed for a load of 0."""
        trace = read_trace(trace_path(name))
        if not load:
            return trace if requests is None else trace.first(requests)
        seconds = busy_seconds(trace, config) / config.replicas / load
        last = max(request.at_s for request in trace.arrivals())
        scaled = read_trace(trace_path(name), seconds / last)
        # A part of the trace comes as fast as all of it.
        return scaled if requests is None else scaled.first(requests)

    part = f", first {requests:,}" if requests is not None else ""
    return Case(f"{name}{part}, {shape}{', store' if store else ''}", config, LOADS, workload)


def shared_prefix_case(requests: int) -> Case:
    """150 groups of 5 users on 8 replicas; all prefixes together are 73 % of the replicas' KV memory."""
    blocks = round(150 * 6000 / CHUNK_TOKENS / 0.73 / 8)
    config = cluster(8, blocks, store=False)

    def workload(load: float) -> Workload:
        some = SharedPrefixLoad(requests=requests, rate=1.0)
        rate = config.replicas * requests / busy_seconds(made(some, CHUNK_TOKENS, 0), config) * load
        return made(some.model_copy(update={"rate": rate}), CHUNK_TOKENS, 0)

    return Case(f"shared prefixes, 8 x {blocks}", config, LOADS, workload)


def agentic_case(store: bool, turns: int = 30) -> Case:
    config = cluster(8, 3000, store)

    def workload(sessions: float) -> Workload:
        return made(AgenticLoad(sessions=round(sessions), turns=turns), CHUNK_TOKENS, 0)

    return Case(f"agents, {turns} turns, 8 x 3,000{', store' if store else ''}", config, SESSIONS, workload)


def busy_seconds(workload: Workload, config: SimulationConfig) -> float:
    """What one engine would need for all of it, were all caches one, and its batches full.

    With `replicas` of them this long is 100 % of capacity: no policy gets through much more. A prompt takes the prefill
    of what was not among the blocks used last, as many as all replicas and stores have room for; an answer its part of
    decode steps that are shared by as many streams as fit.
    """
    nodes = -(-config.replicas // config.replicas_per_node)
    room = config.replicas * config.blocks + nodes * config.tiers.dram // config.chunk_bytes
    cache: dict[int, None] = {}
    seconds = 0.0
    requests = blocks = tokens = 0
    for request in all_requests(workload):
        found = 0
        for block in request.blocks:
            if block not in cache:
                break
            found += 1
        for block in (*request.blocks, *request.answer_blocks):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > room:
            del cache[next(iter(cache))]
        cached = min(found * CHUNK_TOKENS, request.prompt_tokens - 1)
        seconds += config.engine.prefill_overhead_s
        seconds += prefill_s(config.engine, request.prompt_tokens - cached, cached)
        requests += 1
        blocks += -(-(request.prompt_tokens + request.output_tokens) // CHUNK_TOKENS)
        tokens += request.output_tokens
    streams = min(config.engine.max_running, config.blocks * requests / blocks)
    return seconds + tokens * (config.engine.decode_step_s / streams + config.engine.decode_stream_s)
