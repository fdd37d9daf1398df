"""`make bench-router`: what the router adds to a request and to a streamed token, beside other routers.

The same requests go to a fast fake backend alone, through Manta as it is deployed, and through the peers. Systems
take turns within each round. CPU is what a system's own processes used, so a busy machine disturbs it least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from rich.status import Status

from benchmarks import decision_state, peers, systems
from benchmarks.fake_backend import COMPLETIONS_PATH, MODEL
from benchmarks.harness import Interval, Report, interleaved, paired_difference, paired_ratio, terminal
from benchmarks.load import Job, LoadProcess
from benchmarks.systems import System
from cluster.render_sim import SimRenderer
from router.decision_log import Measured
from router.render import Rendered

PROMPT_TOKENS = 1024
PEERS = ("vllm-router", "smg")
ADDED_MS = 1.5
CPU_RATIO = 1.3


@dataclass(frozen=True)
class Shape:
    """One kind of load."""

    name: str
    concurrency: int
    requests: int
    chunks: int = 1
    interval_ms: float = 0.0


@dataclass(frozen=True)
class Sample:
    """One system under one shape, once."""

    shape: Shape
    seconds: float
    first_byte_ms: float
    """Median over the requests."""
    cpu: dict[str, float]
    """Seconds, by part of the system."""

    def per_request_us(self, *parts: str) -> float:
        return self._used(parts) / self.shape.requests * 1e6

    def per_chunk_us(self, *parts: str) -> float:
        return self._used(parts) / (self.shape.requests * self.shape.chunks) * 1e6

    def _used(self, parts: tuple[str, ...]) -> float:
        return sum(self.cpu[part] for part in parts or self.cpu)


Samples = dict[str, list[Sample]]
"""By system; equal places are of one round."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_router", description=__doc__)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0, help="part of the requests of each round")
    options = parser.parse_args()
    report, console = Report("router"), terminal()
    measured = measure(shapes(options.scale), options.rounds, console)
    first_byte_figures(report, measured["first byte"])
    for name in ("20 ms", "5 ms"):
        chunk_figures(report, measured[name])
    request_figures(report, measured["requests"])
    for name in PEERS:
        if name not in measured["requests"]:
            report.skipped(f"{name}, all figures", "", peers.INSTALL)
    return report.finish(console)


def shapes(scale: float) -> list[Shape]:
    def requests(count: int, at_least: int) -> int:
        return max(at_least, round(count * scale))

    return [
        Shape("first byte", 1, requests(100, 20)),
        Shape("20 ms", 32, requests(32, 32), chunks=200, interval_ms=20),
        Shape("5 ms", 64, requests(192, 64), chunks=200, interval_ms=5),
        Shape("requests", 32, requests(2000, 100)),
    ]


def measure(kinds: list[Shape], rounds: int, console: Console) -> dict[str, Samples]:
    """Samples by shape and system."""
    with ExitStack() as stack:
        status = stack.enter_context(console.status("starting the fake backends"))
        fakes = stack.enter_context(systems.backends())
        control = next(iter(fakes.values()))
        there = [System("backend", control, dict)]
        for name in PEERS:
            if peers.command(name) is not None:
                status.update(f"starting {name}")
                there.append(stack.enter_context(systems.peer(name, fakes)))
        status.update("deploying the router")
        there.append(stack.enter_context(systems.manta(fakes)))
        load = stack.enter_context(LoadProcess())
        found: dict[str, Samples] = {}
        for shape in kinds:
            systems.set_pace(control, shape.chunks, shape.interval_ms)
            # The backend alone is a yardstick of time; its CPU is nobody's.
            taking_part = [each for each in there if shape.interval_ms == 0 or each.name != "backend"]
            for system in taking_part:
                warm_up(system, shape, load)
            turns = {system.name: partial(sample, system, shape, load) for system in taking_part}
            found[shape.name] = interleaved(turns, rounds, partial(show_round, status, shape))
    return found


def show_round(status: Status, shape: Shape, number: int, name: str) -> None:
    status.update(f"{shape.name}: round {number + 1}, {name}")


def sample(system: System, shape: Shape, load: LoadProcess) -> Sample:
    before = system.parts()
    outcome = load.run(job(system, shape))
    after = system.parts()
    # An answer's last event carries `[DONE]` too.
    expected = shape.requests * (shape.chunks + 1)
    assert outcome.events == expected, f"{system.name}: {outcome.events} events of {expected}"
    cpu = {part: after[part] - before[part] for part in after}
    return Sample(shape, outcome.seconds, statistics.median(outcome.first_byte_s) * 1e3, cpu)


def warm_up(system: System, shape: Shape, load: LoadProcess) -> None:
    """As many connections as will be needed, one request on each, as far as a request takes no time."""
    if shape.interval_ms == 0:
        load.run(job(system, Shape("warm-up", shape.concurrency, 2 * shape.concurrency)))


def job(system: System, shape: Shape) -> Job:
    stagger_s = shape.interval_ms / 1000
    body = request_body(system.takes_token_ids)
    return Job(system.port, COMPLETIONS_PATH, body, shape.concurrency, shape.requests, stagger_s)


def request_body(token_ids: bool = True) -> str:
    """A prompt of PROMPT_TOKENS, as ids or as a text of as many words."""
    draw = random.Random(5)
    ids = [draw.randrange(50_000) for _ in range(PROMPT_TOKENS)]
    prompt: list[int] | str = ids if token_ids else " ".join(f"{number:05}" for number in ids)
    return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 256, "stream": True})


def first_byte_figures(report: Report, found: Samples) -> None:
    alone = [each.first_byte_ms for each in found["backend"]]
    report.add("first byte, concurrency 1, backend alone", statistics.median(alone), "ms")
    for name in others(found):
        added = paired_difference([each.first_byte_ms for each in found[name]], alone)
        what = f"first byte, concurrency 1, {PROMPT_TOKENS}{prompt_kind(name)}, added by {name}"
        if name == "manta":
            target, holds = f"< {ADDED_MS} ms", added.below(ADDED_MS)
            report.add(what, added.mean, "ms", range_of(added), target, holds)
        else:
            report.add(what, added.mean, "ms", range_of(added))


def chunk_figures(report: Report, found: Samples) -> None:
    shape = found["manta"][0].shape
    load = f"{shape.concurrency} streams, {shape.interval_ms:g} ms apart"
    for name in others(found):
        if name != "manta":
            report.add(f"CPU per chunk, {load}: {name}", per_chunk(found[name]), "µs")
    for part in ("haproxy", "router"):
        report.add(f"CPU per chunk, {load}: manta, {part}", per_chunk(found["manta"], part), "µs")
    total = per_chunk(found["manta"], "router", "haproxy")
    report.add(f"CPU per chunk, {load}: manta, in total", total, "µs")
    per_request = statistics.median(each.per_request_us("router", "haproxy") for each in found["manta"])
    report.add(f"CPU per request of {shape.chunks} chunks, {load}: manta, in total", per_request, "µs")
    what, target = f"CPU per chunk, {load}: router / vllm-router", f"<= {CPU_RATIO}"
    if "vllm-router" not in found:
        report.skipped(what, "", f"vllm-router: {peers.INSTALL}", target)
        return
    theirs = [each.per_chunk_us() for each in found["vllm-router"]]
    for parts, asked in ((("router",), True), (("router", "haproxy"), False)):
        ratio = paired_ratio([each.per_chunk_us(*parts) for each in found["manta"]], theirs)
        if asked:
            report.add(what, ratio.mean, "", range_of(ratio), target, ratio.high <= CPU_RATIO)
        else:
            report.add(f"CPU per chunk, {load}: in total / vllm-router", ratio.mean, "", range_of(ratio))


def request_figures(report: Report, found: Samples) -> None:
    """Where a request's CPU goes: HAProxy, rendering, decision, and what remains of the router's, forwarding."""
    shape = found["manta"][0].shape
    load = f"requests of 1 chunk, {shape.concurrency} at once"
    for name in ("backend", *others(found)):
        rate = statistics.median(shape.requests / each.seconds for each in found[name])
        report.add(f"{load}: {name}", rate, "1/s")
    for name in others(found):
        if name != "manta":
            used = statistics.median(each.per_request_us() for each in found[name])
            report.add(f"CPU per request, {load}: {name}", used, "µs")
    haproxy = statistics.median(each.per_request_us("haproxy") for each in found["manta"])
    router = statistics.median(each.per_request_us("router") for each in found["manta"])
    rendering, decision = asyncio.run(pieces())
    for part, used in (
        ("haproxy", haproxy),
        (f"rendering of {PROMPT_TOKENS} token ids", rendering),
        ("decision", decision),
        ("forwarding, and the rest of the router", router - rendering - decision),
        ("in total", haproxy + router),
    ):
        report.add(f"CPU per request, {load}: manta, {part}", used, "µs")


async def pieces(repeats: int = 300) -> tuple[float, float]:
    """CPU microseconds of rendering a request, and of deciding it between two replicas, measured in this process."""
    body, renderer = request_body().encode(), SimRenderer(131_072)
    rendered: Rendered = await renderer.render(COMPLETIONS_PATH, body)
    assert rendered.prompts is not None
    began = time.process_time()
    for _ in range(repeats):
        await renderer.render(COMPLETIONS_PATH, body)
    rendering = time.process_time() - began
    core = decision_state.core_with(len(systems.FAKES), 256)
    began = time.process_time()
    for number in range(repeats):
        placed = core.place(decision_state.query(number, rendered.prompts[0]))
        assert placed is not None
        core.release(placed, Measured(200, 0, None, 0.0))
    return rendering / repeats * 1e6, (time.process_time() - began) / repeats * 1e6


def others(found: Samples) -> Iterator[str]:
    return (name for name in found if name != "backend")


def prompt_kind(name: str) -> str:
    return " words" if name in systems.TEXT_ONLY else " token ids"


def per_chunk(samples: list[Sample], *parts: str) -> float:
    return statistics.median(each.per_chunk_us(*parts) for each in samples)


def range_of(found: Interval) -> str:
    return f"95 % interval {found.low:.3g} to {found.high:.3g}, paired by round"


if __name__ == "__main__":
    sys.exit(main())
