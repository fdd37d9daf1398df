"""Prompts that one replica computes and another one answers, with every way in which either half can fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.integration.in_process import Cluster, Node, cached_header, chat, prompt, running, until, words
from workers.messages import HANDOVER_HEADER

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ALWAYS: dict[str, Any] = {"prefill": {"when": "always"}}
LONG = words(400, "long")
PREFILL, DECODE = "prefill-0", "decode-1"


@asynccontextmanager
async def pools(router: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Cluster]:
    """One replica that is for prefill and one that is for decode."""
    async with running(roles=("prefill", "decode"), router=router or ALWAYS, **options) as cluster:
        yield cluster
        handovers = [node.hosted.handovers for node in cluster.nodes]
        await until(lambda: not any(len(each) for each in handovers if each is not None))
        await until(lambda: not cluster.router.app._ends.open)


async def counted(cluster: Cluster) -> dict[tuple[str, str], float]:
    """Requests by outcome and reason."""
    samples = [
        sample
        for metric in cluster.core.metrics.registry.collect()
        if metric.name == "manta_router_prefills"
        for sample in metric.samples
        if sample.name.endswith("_total") and sample.value
    ]
    return {(sample.labels["outcome"], sample.labels["reason"]): sample.value for sample in samples}


def nodes(cluster: Cluster) -> tuple[Node, Node]:
    return cluster.node(PREFILL), cluster.node(DECODE)


async def whole_answer(text: str, path: str = COMPLETIONS, **options: Any) -> str:
    """What a cluster of one replica says."""
    async with running(1) as cluster:
        body = prompt(text, **options) if path == COMPLETIONS else chat(text, **options)
        return (await cluster.http.post(path, json=body)).text


def content(answer: httpx.Response) -> list[str]:
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    return [choice.get("text", choice.get("message")) for choice in choices]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 3])
async def test_one_computes_and_the_other_answers(path: str, n: int) -> None:
    async with pools() as cluster:
        body = prompt(LONG, n=n, seed=3) if path == COMPLETIONS else chat(LONG, n=n, seed=3)
        answer = await cluster.http.post(path, json=body)
        assert answer.status_code == 200
        assert answer.headers["x-manta-replica"] == DECODE
        assert answer.headers["x-manta-prefill"] == PREFILL
        tokens = cached_header(answer)
        assert tokens["nixl"] >= 399
        assert tokens["computed"] <= n
        assert await counted(cluster) == {("disaggregated", "always"): 1}
    import json

    whole = json.loads(await whole_answer(LONG, path, n=n, seed=3))
    assert answer.json()["choices"] == whole["choices"]


async def test_a_stream_is_as_ever() -> None:
    async with pools() as cluster:
        answer = await cluster.http.post(COMPLETIONS, json=prompt(LONG, stream=True))
        assert answer.headers["x-manta-prefill"] == PREFILL
        assert answer.text.endswith("data: [DONE]\n\n")


async def test_a_prefix_that_the_answering_replica_has_is_not_sent() -> None:
    async with pools() as cluster:
        _, decode = nodes(cluster)
        await cluster.http.post(COMPLETIONS, json=prompt(LONG[: 4 * 320]))
        answer = await cluster.http.post(COMPLETIONS, json=prompt(LONG))
        tokens = cached_header(answer)
        assert tokens["hbm"] == 320
        assert tokens["nixl"] == 400 - 320 - 1
        assert decode.engine.scheduler.fetched_tokens == 319 + 79


async def test_the_client_gets_the_error_of_a_bad_request_once() -> None:
    async with pools(max_model_len=200) as cluster:
        # The renderer would know: its limit is as it was, and the engines' is another now.
        cluster.router.renderer._max_model_len = 10_000  # type: ignore[attr-defined]
        answer = await cluster.http.post(COMPLETIONS, json=prompt(LONG))
        assert answer.status_code == 400
        assert "maximum context length" in answer.json()["error"]["message"]
        assert [node.engine.counters.prompt_tokens for node in nodes(cluster)] == [0, 0]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "reason"), [("refuse", "failed"), ("die_before_token", "died"), ("hang", "timeout")]
)
async def test_a_prefill_replica_that_fails_costs_time_alone(fault: str, reason: str, stream: bool) -> None:
    router = {"prefill": {"when": "always", "timeout_s": 0.2}}
    async with pools(router) as cluster:
        prefill, _ = nodes(cluster)
        prefill.engine.faults.set(fault, count=1)
        answer = await cluster.http.post(COMPLETIONS, json=prompt(LONG, stream=stream))
        assert answer.status_code == 200
        assert answer.headers["x-manta-prefill"] == f"fallback={reason}"
        assert cached_header(answer) == {"hbm": 0, "computed": 400}
        assert await counted(cluster) == {("fallback", reason): 1}


async def test_a_prefill_replica_that_is_gone_costs_time_alone() -> None:
    async with pools() as cluster:
        prefill, _ = nodes(cluster)
        await prefill.kill()
        answer = await cluster.http.post(COMPLETIONS, json=prompt(LONG))
        assert answer.status_code == 200
        assert cached_header(answer)["computed"] == 400
        outcomes = await counted(cluster)
        assert outcomes in (
            {("fallback", "connect"): 1},
            {("local", "no_prefill"): 1},
            {("fallback", "died"): 1},
        )


async def test_kv_that_is_gone_at_the_fetch_is_computed() -> None:
    async with pools(transfer_tokens_per_s=2000.0) as cluster:
        prefill, decode = nodes(cluster)
        asking = asyncio.create_task(cluster.http.post(COMPLETIONS, json=prompt(LONG)))
        await until(lambda: decode.engine._delayed)
        for name in list(prefill.engine._holds):
            prefill.engine._let_go(name)
        answer = await asking
        assert answer.status_code == 200
        assert cached_header(answer)["computed"] == 400
        assert answer.headers["x-manta-prefill"] == "fallback=not_fetched"


async def test_a_prefill_replica_that_starts_anew_between_the_halves_gives_nobody_s_kv() -> None:
    async with pools(transfer_tokens_per_s=2000.0) as cluster:
        prefill, decode = nodes(cluster)
        asking = asyncio.create_task(cluster.http.post(COMPLETIONS, json=prompt(LONG)))
        await until(lambda: decode.engine._delayed)
        await prefill.kill()
        await prefill.restart()
        answer = await asking
        assert cached_header(answer)["computed"] == 400
    assert content(answer) == content_of(await whole_answer(LONG))


def content_of(text: str) -> list[str]:
    import json

    return [choice["text"] for choice in json.loads(text)["choices"]]


@pytest.mark.parametrize("half", ["computing", "fetching"])
async def test_a_client_that_leaves_leaves_nothing_in_either_half(half: str) -> None:
    speeds = {"prefill_overhead_s": 600.0} if half == "computing" else {"transfer_tokens_per_s": 0.01}
    async with pools(**speeds) as cluster:
        prefill, decode = nodes(cluster)
        asking = asyncio.create_task(cluster.http.post(COMPLETIONS, json=prompt(LONG)))
        await until(lambda: prefill.busy if half == "computing" else decode.engine._delayed)
        asking.cancel()
        # Held for half a minute otherwise.
        await until(lambda: not prefill.engine.load().kv_used and not decode.engine.open_streams, 1.0)


async def test_kv_for_an_answer_that_is_refused_is_free_at_once() -> None:
    async with pools() as cluster:
        prefill, decode = nodes(cluster)
        decode.engine.faults.set("refuse")
        answer = await cluster.http.post(COMPLETIONS, json=prompt(LONG))
        # The other one answers all of it.
        assert answer.status_code == 200
        assert answer.headers["x-manta-replica"] == PREFILL
        await until(lambda: not prefill.engine.load().kv_used, 1.0)
        decode.engine.faults.set("none")


async def test_short_prompts_are_answered_whole_by_either() -> None:
    async with pools({"prefill": {"when": "faster"}}) as cluster:
        answers = await asyncio.gather(
            *(cluster.http.post(COMPLETIONS, json=prompt(f"{n:04} short")) for n in range(8))
        )
        assert {answer.headers["x-manta-prefill"] for answer in answers} == {"local"}
        assert {answer.headers["x-manta-replica"] for answer in answers} == {PREFILL, DECODE}


async def test_where_roles_are_hard_a_prefill_replica_answers_nothing() -> None:
    async with pools({"prefill": {"when": "never", "soft_roles": False}}) as cluster:
        answers = await asyncio.gather(
            *(cluster.http.post(COMPLETIONS, json=prompt(f"{n:04} short")) for n in range(8))
        )
        assert {answer.headers["x-manta-replica"] for answer in answers} == {DECODE}


@pytest.mark.parametrize("on_no_prefill", ["local", "reject"])
async def test_without_a_prefill_replica_it_is_as_configured(on_no_prefill: str) -> None:
    async with pools({"prefill": {"when": "always", "on_no_prefill": on_no_prefill}}) as cluster:
        prefill, _ = nodes(cluster)
        prefill.hosted.cordoned = True
        prefill.hosted.publisher.report(prefill.hosted.load())
        await until(lambda: len(cluster.core.directory.ready()) == 1)
        answer = await cluster.http.post(COMPLETIONS, json=prompt(LONG))
        assert answer.status_code == (200 if on_no_prefill == "local" else 503)
        assert await counted(cluster) == {("local", "no_prefill"): 1}
        assert cluster.router.wakes


async def test_several_prompts_and_other_paths_stay_whole() -> None:
    async with pools() as cluster:
        answer = await cluster.http.post(COMPLETIONS, json=prompt(["one", "two"]))  # type: ignore[list-item]
        assert answer.headers["x-manta-prefill"] == "local"
        assert await counted(cluster) == {("local", "indivisible"): 1}


async def test_a_client_s_headers_ask_nothing_of_a_replica() -> None:
    async with pools({"prefill": {"when": "never"}}) as cluster:
        headers = {HANDOVER_HEADER: "mine", "x-manta-fetch": "12"}
        answer = await cluster.http.post(COMPLETIONS, json=prompt(LONG), headers=headers)
        assert answer.status_code == 200
        assert HANDOVER_HEADER not in answer.headers
        assert content(answer)


async def test_replicas_without_a_way_for_kv_are_not_asked() -> None:
    async with running(2) as cluster:
        answer = await cluster.http.post(COMPLETIONS, json=prompt(LONG))
        assert "x-manta-prefill" not in answer.headers
        assert await counted(cluster) == {}
