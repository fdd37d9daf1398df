"""The benchmarks' own arithmetic: verdicts, intervals, pairing, CPU time, and the file that results end in."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import random
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from functools import partial

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import bench_index, decision_state, harness
from benchmarks.fake_backend import COMPLETIONS_PATH, FakeReplica, Pace
from benchmarks.harness import (
    Interval,
    Report,
    cpu_seconds,
    interleaved,
    interval,
    paired_difference,
    paired_ratio,
    percentile,
    timed,
)
from benchmarks.index_workload import PROMPT_TOKENS, REPLICAS, workload
from benchmarks.load import Job, LoadError, perform
from router.config import RouterConfig
from router.core import RouterCore
from workers.messages import ReplicaInfo


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_results_are_written_with_machine_and_figures(tmp_path):
    report = Report("sample")
    report.at_most("lookup", 12.0, "µs", 54)
    report.skipped("peer", "µs", "not installed")
    assert report.finish(quiet(), tmp_path) == 0
    written = json.loads((tmp_path / "sample.json").read_text())
    assert set(written) == {"machine", "figures"}
    assert "cores" in written["machine"]
    assert written["figures"] == [
        {"figure": "lookup", "value": 12.0, "unit": "µs", "against": "", "target": "< 54 µs", "holds": True},
        {
            "figure": "peer",
            "value": None,
            "unit": "µs",
            "against": "not installed",
            "target": "",
            "holds": None,
        },
    ]


def test_the_table_names_every_figure_and_its_verdict(tmp_path):
    console = quiet()
    report = Report("sample")
    report.at_most("fast enough", 1.0, "ms", 2)
    report.at_most("too slow", 3.0, "ms", 2)
    report.finish(console, tmp_path)
    printed = console.file.getvalue()
    lines = {
        name: next(line for line in printed.splitlines() if name in line) for name in ("fast", "too slow")
    }
    assert "yes" in lines["fast"]
    assert "no" in lines["too slow"]


@pytest.mark.parametrize(("strict", "code"), [("", 0), ("0", 0), ("1", 1)])
def test_only_strict_makes_a_figure_that_does_not_hold_a_failure(tmp_path, monkeypatch, strict, code):
    monkeypatch.setenv("STRICT", strict)
    report = Report("sample")
    report.at_most("lookup", 60.0, "µs", 54)
    assert report.finish(quiet(), tmp_path) == code


def test_strict_passes_when_all_that_was_measured_holds(tmp_path, monkeypatch):
    monkeypatch.setenv("STRICT", "1")
    report = Report("sample")
    report.at_most("lookup", 50.0, "µs", 54)
    report.less_than("lookup", 50.0, "µs", "a peer that is not installed", None)
    report.add("no target", 1.0, "s")
    assert report.finish(quiet(), tmp_path) == 0


def test_a_figure_holds_only_strictly_below_its_limit_or_peer():
    report = Report("sample")
    report.at_most("equal", 54.0, "µs", 54)
    report.less_than("equal", 54.0, "µs", "peer", 54.0)
    report.less_than("below", 53.0, "µs", "peer", 54.0)
    assert [figure.holds for figure in report.figures] == [False, False, True]
    assert report.figures[2].against == "peer: 54 µs"


def test_an_undecided_comparison_does_not_hold():
    assert interval([0.9, 1.1, 1.0]).low < 1.05
    assert not interval([0.9, 1.1, 1.0]).below(1.05)
    assert interval([0.9, 0.91, 0.89, 0.9]).below(1.05)


def test_a_single_sample_decides_nothing():
    assert interval([1.0]) == Interval(1.0, -math.inf, math.inf)
    assert not interval([1.0]).below(1e9)
    assert not interval([]).below(1e9)
    assert paired_ratio([1.0], [2.0]) == Interval(0.5, 0.0, math.inf)


def test_the_interval_of_few_samples_is_students():
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * math.sqrt(2.5) / math.sqrt(5)
    assert found == pytest.approx((3.0, 3.0 - half, 3.0 + half))


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.sampled_from([5, 60]))
def test_an_interval_encloses_the_mean_and_widens_with_the_spread(seed, n):
    draw = random.Random(seed)
    narrow = [10 + draw.gauss(0, 1) for _ in range(n)]
    mean = sum(narrow) / n
    wide = [mean + 5 * (value - mean) for value in narrow]
    near, far = interval(narrow), interval(wide)
    assert near.low <= near.mean <= near.high
    assert far.high - far.low == pytest.approx(5 * (near.high - near.low), rel=1e-6)


def test_pairing_removes_what_drifts_for_both():
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    ours, theirs = [1.2 * value for value in drift], drift
    assert paired_ratio(ours, theirs) == pytest.approx((1.2, 1.2, 1.2))
    shifted = [value + 0.5 for value in drift]
    assert paired_difference(shifted, drift) == pytest.approx((0.5, 0.5, 0.5))


def test_rounds_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="positive"):
        paired_ratio([1.0, 0.0], [1.0, 1.0])


def test_every_round_measures_every_system_and_begins_with_another():
    order: list[str] = []
    systems = {name: (lambda name=name: order.append(name) or len(order)) for name in "abc"}
    found = interleaved(systems, 3)
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_warmup_is_not_counted():
    calls: list[int] = []
    assert len(timed(lambda: calls.append(1), repeats=4, warmup=2)) == 4
    assert len(calls) == 6


def test_percentiles_are_samples():
    samples = [float(value) for value in range(100, 0, -1)]
    assert percentile(samples, 0.5) == 50.0
    assert percentile(samples, 0.95) == 95.0
    assert percentile([7.0], 0.5) == 7.0


def test_cpu_seconds_counts_a_whole_process_tree():
    burn = "import time\nwhile time.process_time() < 0.1: pass\n"
    child = "subprocess.Popen([sys.executable, '-c', 'while True: pass']).wait()"
    parent = f"import subprocess, sys\n{burn}{child}"
    process = subprocess.Popen([sys.executable, "-c", parent])
    try:
        deadline = time.monotonic() + 60
        while cpu_seconds(process.pid) < cpu_seconds(process.pid, tree=False) + 0.1:
            assert time.monotonic() < deadline, "the child's time was not counted"
            time.sleep(0.01)
        assert cpu_seconds(process.pid, tree=False) >= 0.05
    finally:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        process.wait()
    assert cpu_seconds(process.pid) == 0.0


def test_the_machine_is_described_by_what_decides_speed():
    described = harness.machine()
    assert f"{len(os.sched_getaffinity(0))} cores" in described
    assert "Python" in described


SECRET = "the-secret-of-a-test"


@asynccontextmanager
async def fake_backend(pace: Pace):
    server = await asyncio.get_running_loop().create_server(
        partial(FakeReplica, "fake-0", pace, SECRET), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_the_load_generator_receives_every_event_of_every_request():
    async with fake_backend(Pace(chunks=7, interval_s=0.001)) as port:
        outcome = await perform(
            Job(port, COMPLETIONS_PATH, "{}", concurrency=3, requests=10, stagger_s=0.001)
        )
    assert outcome.events == 10 * (7 + 1)
    assert len(outcome.first_byte_s) == 10
    assert outcome.refused == 0
    assert min(outcome.first_byte_s) > 0


async def test_the_load_generator_counts_refusals_and_reports_cut_answers():
    async with fake_backend(Pace()) as port:
        assert (await perform(Job(port, "/elsewhere", "{}", 2, 5))).refused == 5

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
        writer.close()

    async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(LoadError, match="closed a connection"):
            await perform(Job(port, "/", "{}", 1, 1))


async def test_a_router_takes_the_fake_backend_for_a_replica():
    ready = asyncio.Event()
    async with fake_backend(Pace()) as port:
        core = RouterCore(RouterConfig(), SECRET)
        core.directory._on_change = lambda: ready.set() if core.directory.ready() else None
        core.set_pool("unified", [ReplicaInfo("fake-0", "unified", "node", f"127.0.0.1:{port}", ("sim",))])
        await asyncio.wait_for(ready.wait(), 30)
        assert [entry.info.id for entry in core.directory.ready()] == ["fake-0"]
        await core.close()


def test_the_index_benchmark_measures_what_it_says():
    report, work = Report("index"), workload(sequences=3)
    bench_index.index_figures(report, work, 2, {"lookup_16": 1e9, "hash_16": 0.0})
    found = {(figure.figure, figure.target): figure.holds for figure in report.figures}
    assert found["lookup of 16k tokens, 256-token chunks, beside the peer's own grain",
                 "< Dynamo RadixTree, 16-token blocks"] is True  # fmt: skip
    assert found["hash of 16k tokens, 256-token chunks, beside the peer's own grain",
                 "< Dynamo RadixTree, 16-token blocks"] is False  # fmt: skip
    assert len(work.held(REPLICAS - 1)) == PROMPT_TOKENS


@pytest.mark.parametrize("replicas", [1, 8])
def test_decisions_are_measured_on_prompts_that_some_replicas_hold(replicas):
    draw = random.Random(0)
    core = decision_state.core_with(replicas, 256)
    decision_state.fill(core, 256, 4, 1024, draw)
    matched = []
    for number, prompt in enumerate(list(decision_state.prompts(core, 256, 4096, 6, draw))):
        placed = core.place(decision_state.query(number, prompt))
        assert placed is not None
        matched.append(placed.matched_tokens)
    assert max(matched) > 0
    core.index.check_integrity()
    core.ledger.check_integrity()
