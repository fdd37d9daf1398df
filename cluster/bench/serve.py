"""One benchmark run from its configuration to its result."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import NamedTuple

import uvloop
from rich.console import Console

from cluster.bench.client import Client, EndpointError
from cluster.bench.config import BenchConfig
from cluster.bench.lengths import Lengths, measure_lengths
from cluster.bench.prompts import WORDS, PromptWriter
from cluster.bench.record import RunOutcome
from cluster.bench.result import BenchResult, make_result
from cluster.bench.runner import Progress, Runner, warmup_config
from cluster.bench.tables import shown
from cluster.bench.workloads import planned_requests


class Served(NamedTuple):
    result: BenchResult
    errors: list[str]
    """One per failed request."""


def serve(config: BenchConfig, console: Console, save_requests: bool = False) -> Served:
    """Run it to its end, or until Ctrl-C or SIGTERM, after which what was measured until then is the result.

    Raises EndpointError and TraceError where nothing can be measured.
    """
    return uvloop.run(_until_stopped(config, console, save_requests))


async def _until_stopped(config: BenchConfig, console: Console, save_requests: bool) -> Served:
    stop = asyncio.Event()
    return await run_bench(config, console, stop, save_requests, lambda: _on_signals(stop.set))


async def run_bench(
    config: BenchConfig,
    console: Console,
    stop: asyncio.Event,
    save_requests: bool = False,
    sending: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Served:
    """As `serve`, within a loop; `stop` ends it early. `sending` is around the time in which the load is sent."""
    planned = planned_requests(config.workload, config.num_requests, config.duration_s)
    progress = Progress(planned)
    async with Client(config.target, on_tokens=progress.on_chunks) as client:
        model = await client.find_model()
        config = config.model_copy(update={"target": config.target.model_copy(update={"model": model})})
        lengths = await _lengths(config, client)
        with sending(), _steady_memory():
            await _warm_up(config, client, lengths, console, stop)
            started = datetime.now(UTC)
            async with shown(progress, config.workload.kind, console):
                outcome = await _run(config, client, lengths, progress, stop)
    errors = [record.error for record in outcome.records if record.error is not None]
    return Served(make_result(config, lengths, outcome, started, save_requests), errors)


async def _lengths(config: BenchConfig, client: Client) -> Lengths:
    if config.target.prompt_form == "ids":
        return Lengths(WORDS, exact=True)
    return await measure_lengths(client, config.target.endpoint == "chat")


async def _warm_up(
    config: BenchConfig, client: Client, lengths: Lengths, console: Console, stop: asyncio.Event
) -> None:
    """Raises EndpointError when every request of it fails, for then the run would too."""
    if not config.warmup:
        return
    progress = Progress(config.warmup)
    async with shown(progress, "warm-up", console):
        outcome = await _run(warmup_config(config), client, lengths, progress, stop)
    if outcome.records and all(record.outcome == "error" for record in outcome.records):
        raise EndpointError(f"every request of the warm-up failed: {outcome.records[0].error}")


async def _run(
    config: BenchConfig, client: Client, lengths: Lengths, progress: Progress, stop: asyncio.Event
) -> RunOutcome:
    writer = PromptWriter(config.seed, lengths.words, config.target.vocabulary)
    return await Runner(config, client, writer, progress).run(stop)


@contextlib.contextmanager
def _steady_memory() -> Iterator[None]:
    """What is there before the run is not looked through by the garbage collector during it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
