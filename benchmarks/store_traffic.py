"""What the connector costs where it gains nothing: CPU seconds per token of traffic in which no prefix comes twice."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.engines import Engine, Wanted, engines, manta_connector, new_prompt
from benchmarks.harness import Report, interleaved, paired_ratio
from benchmarks.scheduler_calls import calls_figure
from benchmarks.store_nodes import CacheNode, cache_nodes

PROMPT_TOKENS, ANSWER_TOKENS = 1024, 16
TURNS = 2
"""Of each engine in a round, a prompt each: the shorter the turns, the more alike is what else the machine does."""
MOST = 1.03
DRAM_MIB = 128
"""Less than all prompts fill, so that the store evicts as it does in a cluster that runs."""


def traffic_figures(report: Report, model: Path, rounds: int, on_round: Callable[[str], None]) -> None:
    draw = random.Random(7)
    with ExitStack() as stack:
        on_round("starting the engines")
        plain, manta, node = stack.enter_context(systems(model))
        prompts: list[list[int]] = []
        # Both compute the same prompts, one each; which of them is first changes.
        given = {"plain": 0, "manta": 0}

        def measured(name: str, engine: Engine) -> list[float]:
            if given[name] == len(prompts):
                prompts.append(new_prompt(PROMPT_TOKENS, draw))
            given[name] += 1
            return cpu_per_token(engine, node, prompts[given[name] - 1])

        ways = {"plain": partial(measured, "plain", plain), "manta": partial(measured, "manta", manta)}
        for name in ways:
            ways[name]()
        turns = TURNS * rounds
        found = interleaved(
            ways, turns, lambda number, name: on_round(f"prompt {number + 1} of {turns}, {name}")
        )
        saved = manta.metrics("manta_kv_saved_chunks_total")
        calls_figure(report, "prompts without reuse", [manta])
    if not any(count for name, count in saved.items() if "outcome=stored" in name):
        raise RuntimeError(f"the connector saved nothing: {saved}")
    figures(report, found)


def figures(report: Report, found: dict[str, list[list[float]]]) -> None:
    """`found`: by engine and turn, CPU seconds per token of the engine and of the cache actor."""
    parts = {name: [list(part) for part in zip(*rounds, strict=True)] for name, rounds in found.items()}
    (plain, idle), (engine, actor) = parts["plain"], parts["manta"]
    name = f"CPU per token without reuse, beside the engine without the connector ({_us(plain)} µs)"
    _overhead(report, f"{name}: engine", engine, plain, "")
    both = [sum(pair) for pair in zip(engine, actor, strict=True)]
    detail = f"; the actor {_us(actor)} µs, as idle as beside the other engine {_us(idle)}"
    _overhead(report, f"{name}: engine and cache actor", both, plain, detail)


def _overhead(report: Report, figure: str, ours: list[float], theirs: list[float], detail: str) -> None:
    ratio = paired_ratio(ours, theirs)
    low, high = ((bound - 1) * 100 for bound in (ratio.low, ratio.high))
    against = f"{_us(ours)} µs, 95 % interval {low:+.1f} to {high:+.1f} %{detail}"
    target = f"< {(MOST - 1) * 100:.0f} %"
    report.add(figure, (ratio.mean - 1) * 100, "% more", against, target, ratio.below(MOST))


def _us(seconds: list[float]) -> str:
    return f"{statistics.fmean(seconds) * 1e6:,.0f}"


def cpu_per_token(engine: Engine, node: CacheNode, prompt: Sequence[int]) -> list[float]:
    """CPU seconds of the engine and of the cache actor, what is saved after the answer included."""
    parts = (engine.cpu_seconds, node.cpu_seconds)
    before = [part() for part in parts]
    answer = engine.run(prompt, ANSWER_TOKENS)
    assert not answer.cached, f"{answer.cached} tokens were not computed"
    tokens = len(prompt) + len(answer.tokens)
    node.wait_quiet()
    return [(part() - start) / tokens for part, start in zip(parts, before, strict=True)]


@contextmanager
def systems(model: Path) -> Iterator[tuple[Engine, Engine, CacheNode]]:
    """An engine without the connector and one with it, in turn on the same core."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mb-")))
        (node,) = stack.enter_context(cache_nodes([{"share": "on", "dram": {"mib": DRAM_MIB}}]))
        connector = manta_connector(node.info.socket, "manta", model, folder / "report.json")
        plain, manta = stack.enter_context(engines(model, [Wanted(core=1), Wanted(connector, 1)]))
        yield plain, manta, node
