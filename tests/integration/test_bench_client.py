"""The benchmark against a cluster in this process, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from cluster.bench.client import EndpointError
from cluster.bench.config import BenchConfig, bench_config
from cluster.bench.record import RequestRecord
from cluster.bench.result import BenchResult, load_result
from cluster.bench.serve import run_bench
from tests.integration.in_process import Cluster, running, until

WORD = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
END = b'data: {"choices":[{"text":"b","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def config(url: str, workload: str = "random", **fields: Any) -> BenchConfig:
    arrival, target = fields.pop("arrival", {}), fields.pop("target", {})
    bounds = {
        name: fields.pop(name)
        for name in ("num_requests", "duration_s", "warmup", "goodput")
        if name in fields
    }
    return bench_config(
        {
            "workload": {"kind": workload, **fields},
            "arrival": arrival,
            "target": {"url": url, **target},
            **bounds,
        }
    )


async def bench(planned: BenchConfig, stop: asyncio.Event | None = None) -> BenchResult:
    served = await run_bench(
        planned, Console(file=io.StringIO()), stop or asyncio.Event(), save_requests=True
    )
    return served.result


def requests(result: BenchResult) -> list[RequestRecord]:
    assert result.requests is not None
    return result.requests


@pytest.fixture
async def one_replica() -> AsyncIterator[Cluster]:
    """Where prompts are found again is then no question of routing."""
    async with running(1) as cluster:
        yield cluster


@contextlib.asynccontextmanager
async def endpoint(handler: Handler) -> AsyncIterator[str]:
    """A server whose completions are the handler's."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


COMPLETIONS = {"endpoint": "completions"}


async def stream(request: web.Request, *parts: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response


@pytest.mark.parametrize("target", [{}, COMPLETIONS, {**COMPLETIONS, "prompt_form": "ids"}])
async def test_lengths_are_exact_in_every_form(cluster: Cluster, target: dict[str, Any]) -> None:
    result = await bench(
        config(cluster.router.url, input_tokens=100, output_tokens=7, num_requests=6, target=target)
    )
    template = 8 if not target else 0
    assert result.metrics.completed == 6
    assert {(each.input_tokens, each.output_tokens) for each in requests(result)} == {(100 + template, 7)}
    assert result.lengths.startswith("exact")


async def test_shared_prefixes_are_found_again_and_counted(one_replica: Cluster) -> None:
    planned = config(
        one_replica.router.url,
        "shared-prefix",
        groups=2,
        users=8,
        prefix_tokens=256,
        suffix_tokens=16,
        output_tokens=4,
        arrival={"concurrency": 1},
        target=COMPLETIONS,
    )
    result = await bench(planned)
    metrics = result.metrics
    assert metrics.completed == 16
    assert metrics.cached_tokens == 14 * 256
    assert metrics.hit_ratio == pytest.approx(14 * 256 / (16 * 272))
    assert metrics.tiers["hbm"] == metrics.cached_tokens
    assert sum(metrics.tiers.values()) == metrics.input_tokens
    assert metrics.replicas == {"replica-0": 16}


@pytest.mark.parametrize("target", [{}, COMPLETIONS, {**COMPLETIONS, "prompt_form": "ids"}])
async def test_a_conversation_is_served_from_its_own_history(
    one_replica: Cluster, target: dict[str, Any]
) -> None:
    planned = config(
        one_replica.router.url,
        "multi-turn",
        conversations=2,
        turns=3,
        input_tokens=64,
        output_tokens=16,
        arrival={"concurrency": 1},
        target=target,
    )
    records = requests(await bench(planned))
    assert [(each.session, each.turn) for each in records] == [
        (f"conversation-{number}", turn) for number in range(2) for turn in range(3)
    ]
    for first, second in itertools.pairwise(records[:3]):
        assert second.input_tokens >= first.input_tokens + 16 + 64
        assert (second.cached_tokens or 0) >= (first.input_tokens // 16) * 16


async def test_a_trace_is_replayed_at_its_times_with_its_sharing(
    one_replica: Cluster, tmp_path: Path
) -> None:
    rows = [
        '{"timestamp": 0, "input_length": 1024, "output_length": 40, "hash_ids": [1, 2]}',
        '{"timestamp": 1000, "input_length": 1536, "output_length": 40, "hash_ids": [1, 2, 3]}',
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(rows))
    planned = config(
        one_replica.router.url,
        "trace",
        path=path,
        time_scale=0.2,
        length_scale=0.25,
        arrival={"kind": "trace"},
        target=COMPLETIONS,
    )
    first, second = requests(await bench(planned))
    assert (first.input_tokens, second.input_tokens) == (256, 384)
    assert (first.output_tokens, second.output_tokens) == (10, 10)
    assert second.cached_tokens == 256
    assert (first.due_s, second.due_s) == (0, pytest.approx(0.2))
    assert second.sent_s >= 0.2


async def test_poisson_arrivals_do_not_wait_for_answers() -> None:
    async with running(1, decode_tokens_per_s=20.0) as cluster:
        planned = config(
            cluster.router.url,
            num_requests=20,
            input_tokens=8,
            output_tokens=8,
            arrival={"kind": "poisson", "rate": 200},
        )
        records = requests(await bench(planned))
        assert len(records) == 20
        assert max(each.due_s for each in records) == pytest.approx(0.1)
        assert max(each.sent_s for each in records) < min(each.end_s for each in records)


async def test_a_closed_loop_keeps_to_its_concurrency() -> None:
    open_requests: list[int] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        open_requests.append(1 + (open_requests[-1] if open_requests else 0))
        await asyncio.sleep(0)
        answer = await stream(request, WORD, END)
        open_requests.append(open_requests[-1] - 1)
        return answer

    async with endpoint(handler) as url:
        result = await bench(config(url, num_requests=30, arrival={"concurrency": 3}, target=COMPLETIONS))
    assert result.metrics.completed == 30
    assert max(open_requests) <= 3


async def test_the_warm_up_is_not_measured_and_fills_no_cache(cluster: Cluster) -> None:
    planned = config(cluster.router.url, input_tokens=200, output_tokens=2, num_requests=4, warmup=5)
    metrics = (await bench(planned)).metrics
    assert metrics.completed == 4
    assert metrics.cached_tokens == 0


async def test_nothing_is_sent_after_the_duration_and_what_runs_ends(cluster: Cluster) -> None:
    planned = config(cluster.router.url, input_tokens=8, output_tokens=50, duration_s=0.2)
    result = await bench(planned)
    assert result.metrics.completed == len(requests(result)) > 0
    assert all(each.sent_s <= 0.2 for each in requests(result))
    assert not result.interrupted


@pytest.mark.parametrize("arrival", [{"concurrency": 4}, {"kind": "poisson", "rate": 500}])
async def test_stopping_keeps_what_was_measured(arrival: dict[str, Any]) -> None:
    async with running(1, decode_tokens_per_s=500.0) as cluster:
        stop = asyncio.Event()
        planned = config(
            cluster.router.url, input_tokens=8, output_tokens=20, num_requests=5000, arrival=arrival
        )
        run = asyncio.create_task(bench(planned, stop))
        await until(lambda: cluster.nodes[0].engine.counters.prompt_tokens > 200)
        await until(lambda: cluster.nodes[0].busy)
        stop.set()
        result = await run
        assert result.interrupted
        assert result.metrics.interrupted > 0
        assert len(requests(result)) < 5000
        await until(cluster.at_rest)


async def test_errors_are_counted_by_kind_and_end_nothing() -> None:
    kinds = iter(["ok", "refuse", "cut", "garbage", "hang", "reset"] * 2)

    async def handler(request: web.Request) -> web.StreamResponse:
        kind = next(kinds)
        if kind == "refuse":
            return web.json_response({"error": {"message": "too full"}}, status=503)
        if kind == "hang":
            await asyncio.sleep(30)
        if kind == "reset":
            assert request.transport is not None
            request.transport.abort()
        parts = {"ok": (WORD, END), "cut": (WORD,), "garbage": (b"data: {nonsense\n\n",)}
        return await stream(request, *parts.get(kind, ()))

    async with endpoint(handler) as url:
        target = {**COMPLETIONS, "timeout_s": 0.3}
        result = await bench(config(url, num_requests=12, arrival={"concurrency": 1}, target=target))
    metrics = result.metrics
    assert (metrics.completed, metrics.failed) == (2, 10)
    assert metrics.errors == {"HTTP 503": 2, "answer": 4, "timeout": 2, "connection": 2}
    refused = next(each for each in requests(result) if each.status == 503)
    assert refused.error == 'HTTP 503: {"error": {"message": "too full"}}'


@pytest.mark.parametrize("retry", [False, True])
async def test_a_429_is_asked_again_after_its_time_if_wanted(retry: bool) -> None:
    seen = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal seen
        seen += 1
        if seen <= 2:
            return web.Response(status=429, headers={"retry-after": "0"})
        return await stream(request, WORD, END)

    async with endpoint(handler) as url:
        target = {**COMPLETIONS, "retry_429": retry}
        metrics = (
            await bench(config(url, num_requests=3, arrival={"concurrency": 1}, target=target))
        ).metrics
    if retry:
        assert (metrics.completed, metrics.failed, metrics.retries, seen) == (3, 0, 2, 5)
    else:
        assert (metrics.completed, metrics.errors, metrics.retries, seen) == (1, {"HTTP 429": 2}, 0, 3)


async def test_a_failed_turn_does_not_end_its_conversation() -> None:
    prompts: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        prompts.append((await request.json())["prompt"])
        if len(prompts) == 2:
            return web.Response(status=500)
        return await stream(request, WORD, END)

    async with endpoint(handler) as url:
        planned = config(url, "multi-turn", conversations=1, turns=3, input_tokens=4, target=COMPLETIONS)
        metrics = (await bench(planned)).metrics
    assert (metrics.completed, metrics.failed) == (2, 1)
    first, second, third = prompts
    assert second.startswith(first + "ab")
    assert third.startswith(first + "ab")
    assert third != second


async def test_what_is_sent_is_what_was_asked_for() -> None:
    bodies: list[dict[str, Any]] = []
    headers: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        headers.append(request.headers)
        return await stream(request, WORD, END)

    async with endpoint(handler) as url:
        target = {**COMPLETIONS, "headers": {"x-team": "a"}, "temperature": 0.5, "extra_body": {"top_p": 0.9}}
        result = await bench(config(url, num_requests=1, input_tokens=3, output_tokens=9, target=target))
    (body,) = bodies
    prompt = body.pop("prompt")
    assert len(prompt.split()) == 3
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "ignore_eos": True,
        "top_p": 0.9,
    }
    assert headers[0]["x-team"] == "a"
    assert result.lengths.startswith("approximate")


async def test_an_endpoint_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(EndpointError, match="/v1/models"):
        await bench(config("http://127.0.0.1:9", num_requests=1))


async def test_a_warm_up_in_which_everything_fails_ends_the_run() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=400, text="no such parameter")

    async with endpoint(handler) as url:
        with pytest.raises(EndpointError, match="HTTP 400: no such parameter"):
            await bench(config(url, num_requests=5, warmup=2, target=COMPLETIONS))


async def test_ctrl_c_prints_and_saves_what_was_measured(tmp_path: Path) -> None:
    seen = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal seen
        seen += 1
        return await stream(request, WORD, END)

    async with endpoint(handler) as url:
        saved = tmp_path / "result.json"
        options = ["random", "--url", url, "--endpoint", "completions", "--num-requests", "1000000"]
        program = "from cluster.bench.cli import app; app()"
        run = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, "serve", *options, "--json", str(saved)),
            cwd=Path(__file__).parents[2],
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            await until(lambda: seen > 50 or run.returncode is not None, deadline_s=60)
            run.send_signal(signal.SIGINT)
            out, err = await asyncio.wait_for(run.communicate(), 30)
        finally:
            if run.returncode is None:
                run.kill()
                await run.wait()
    assert run.returncode == 130, err.decode()
    assert b"requests completed" in out
    result = load_result(saved)
    assert result.interrupted
    assert result.metrics.completed > 30
