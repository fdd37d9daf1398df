"""What sharing buys: conversations whose KV is four times the engines' room for it, with the store and without."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.engines import KV_BYTES_PER_TOKEN, Engine, Turns, Wanted, engines, manta_connector
from benchmarks.harness import Report
from benchmarks.scheduler_calls import calls_figure
from benchmarks.store_nodes import cache_nodes

ENGINES = 2
ROOM_TOKENS = 4608
"""Of an engine's own KV."""
HISTORY_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 768, 32, 16
CONVERSATIONS = 4 * ROOM_TOKENS // HISTORY_TOKENS
"""Of an engine. Each stays with its engine, as a router would have it: without the store nothing better can be done."""
CONCURRENCIES = (1, 2, 4)
"""Of an engine."""


class Level(NamedTuple):
    """At one concurrency, all engines together."""

    concurrency: int
    ttft_s: float
    """Median."""
    throughput: float
    """Tokens of answers per second."""
    cached: float
    """Share of the prompts' tokens that were not computed."""


def sharing_figures(report: Report, model: Path, seconds: float, on_round: Callable[[str], None]) -> None:
    with ExitStack() as stack:
        on_round("starting the engines")
        without, with_store = stack.enter_context(systems(model))
        on_round("every conversation's first turn")
        talk(with_store, 2, 0.0)
        found: dict[str, list[Level]] = {"without": [], "with": []}
        for concurrency in CONCURRENCIES:
            for name, pool in (("without", without), ("with", with_store)):
                on_round(f"{name} the store, {concurrency * ENGINES} at once")
                found[name].append(level(talk(pool, concurrency, seconds), concurrency))
        calls_figure(report, "conversations", with_store)
    figures(report, found["without"], found["with"])


def figures(report: Report, without: Sequence[Level], with_store: Sequence[Level]) -> None:
    name = f"{CONVERSATIONS * ENGINES} conversations, 4 x the engines' room for KV"
    for plain, ours in zip(without, with_store, strict=True):
        at = f"{name}, {plain.concurrency * ENGINES} at once"
        for figure, value, theirs, unit in (
            ("throughput", ours.throughput, plain.throughput, "tok/s"),
            ("TTFT, median", ours.ttft_s * 1e3, plain.ttft_s * 1e3, "ms"),
            ("not computed", ours.cached * 100, plain.cached * 100, "% of prompts"),
        ):
            report.add(f"{at}: {figure}", value, unit, f"without the store: {theirs:,.0f} {unit}")
    # The TTFT that the engines alone reach when nobody waits for another.
    limit_s = without[0].ttft_s
    best = max(
        (level for level in with_store if level.ttft_s <= limit_s),
        key=lambda level: level.throughput,
        default=None,
    )
    equal = f"{name}, at a TTFT of {limit_s * 1e3:,.0f} ms"
    if best is None:
        report.add(f"{equal}: throughput gained", 0.0, "x", "never reached with the store", "> 1 x", False)
        return
    gained = best.throughput / without[0].throughput
    report.add(
        f"{equal}: throughput gained", gained, "x",
        f"{without[0].throughput:,.1f} tok/s without the store", "> 1 x", gained > 1,
    )  # fmt: skip
    report.add(
        f"{equal}: concurrency",
        best.concurrency * ENGINES,
        "",
        f"without the store: {without[0].concurrency * ENGINES}",
    )


def talk(pool: Sequence[Engine], concurrency: int, seconds: float) -> list[Turns]:
    """Turns of all conversations, on all engines at once."""
    with ThreadPoolExecutor(len(pool)) as threads:

        def one(number: int) -> Turns:
            mine = range(number * CONVERSATIONS, (number + 1) * CONVERSATIONS)
            return pool[number].talk(mine, HISTORY_TOKENS, TURN_TOKENS, ANSWER_TOKENS, concurrency, seconds)

        return list(threads.map(one, range(len(pool))))


def level(engines: Sequence[Turns], concurrency: int) -> Level:
    ttfts = [ttft for turns in engines for ttft in turns.ttfts_s]
    throughput = sum(turns.answered / turns.seconds for turns in engines)
    cached = sum(turns.cached for turns in engines) / sum(turns.prompted for turns in engines)
    return Level(concurrency, statistics.median(ttfts), throughput, cached)


@contextmanager
def systems(model: Path) -> Iterator[tuple[list[Engine], list[Engine]]]:
    """Engines without the store and with it, one of each on a core."""
    # Of all histories and of what they grow by.
    needed = 2 * ENGINES * CONVERSATIONS * HISTORY_TOKENS * KV_BYTES_PER_TOKEN >> 20
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mb-")))
        config = {"share": "on", "dram": {"mib": needed}}
        (node,) = stack.enter_context(cache_nodes([config], object_store_mib=int(needed / 0.85)))
        wanted = [Wanted(None, core, ROOM_TOKENS) for core in range(ENGINES)]
        for core in range(ENGINES):
            connector = manta_connector(
                node.info.socket, f"manta-{core}", model, folder / f"report-{core}.json", "faster"
            )
            wanted.append(Wanted(connector, core, ROOM_TOKENS))
        started = stack.enter_context(engines(model, wanted))
        yield started[:ENGINES], started[ENGINES:]
