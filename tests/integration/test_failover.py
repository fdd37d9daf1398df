"""Replicas that fail: unseen before the first token, never a hang after it."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from tests.integration.in_process import Cluster, Node, chat, prompt, running, until, words

CHAT = "/v1/chat/completions"
streamed_or_whole = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


async def struck(cluster: Cluster, fault: str, stream: bool) -> tuple[asyncio.Task[httpx.Response], Node]:
    """A request that a fault holds up, and the replica that has it. The others are well."""
    for node in cluster.nodes:
        node.engine.faults.set(fault)
    asking = asyncio.create_task(cluster.http.post(CHAT, json=chat("struck", stream=stream)))
    await until(lambda: any(node.hosted.app.open_requests for node in cluster.nodes))
    victim = cluster.serving()
    for node in cluster.nodes:
        if node is not victim:
            node.engine.faults.set("none")
    return asking, victim


@streamed_or_whole
async def test_a_request_outlives_its_replica_if_it_had_no_token_yet(cluster: Cluster, stream: bool) -> None:
    asking, victim = await struck(cluster, "hang", stream)
    await victim.kill()
    answer = await asking
    assert answer.status_code == 200
    (other,) = [node for node in cluster.nodes if node is not victim]
    assert answer.headers["x-manta-replica"] == other.id
    assert [d.choice.replica for d in cluster.core.log if d.choice] == [victim.id, other.id]
    assert [d.measured.status for d in cluster.core.log if d.measured] == [502, 200]


async def test_a_client_that_leaves_after_a_failure_is_not_logged_as_another_failure() -> None:
    async with running(2, prefill_overhead_s=600.0) as cluster:
        asking, victim = await struck(cluster, "hang", stream=True)
        await victim.kill()
        await until(lambda: any(node.busy for node in cluster.nodes))
        asking.cancel()
        await until(cluster.at_rest)
        assert [d.measured.status for d in cluster.core.log if d.measured] == [502, 499]


@streamed_or_whole
@pytest.mark.parametrize("fault", ["die_before_token", "refuse"])
async def test_the_head_tells_who_answered_after_a_failure(fault: str, stream: bool) -> None:
    async with running(3) as cluster:
        bad = cluster.nodes[:2]
        for node in bad:
            node.engine.faults.set(fault)
        answers = [await cluster.http.post(CHAT, json=chat(f"t{n}", stream=stream)) for n in range(4)]
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.headers["x-manta-replica"] for answer in answers} == {"replica-2"}
        retried = sum(d.choice is not None and d.choice.replica != "replica-2" for d in cluster.core.log)
        assert retried > 0
        assert f"manta_router_retries_total {float(retried)}" in (await cluster.http.get("/metrics")).text


async def test_a_whole_answer_whose_replica_dies_inside_it_is_made_again_elsewhere(cluster: Cluster) -> None:
    for node in cluster.nodes:
        node.engine.faults.set("die_mid_stream", after_tokens=2)
    cluster.nodes[1].engine.faults.set("none")
    answers = [await cluster.http.post(CHAT, json=chat(f"t{number}")) for number in range(3)]
    assert {answer.headers["x-manta-replica"] for answer in answers} == {cluster.nodes[1].id}
    assert all(answer.json()["usage"]["completion_tokens"] == 8 for answer in answers)


async def test_where_all_refuse_the_client_gets_what_the_last_one_said(cluster: Cluster) -> None:
    for node in cluster.nodes:
        node.engine.faults.set("refuse")
    answer = await cluster.http.post(CHAT, json=chat("a"))
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "ServiceUnavailableError"
    assert len(cluster.core.log) == 2


async def test_where_all_die_before_the_token_the_error_is_a_502(cluster: Cluster) -> None:
    for node in cluster.nodes:
        node.engine.faults.set("die_before_token")
    answer = await cluster.http.post(CHAT, json=chat("a", stream=True))
    assert answer.status_code == 502
    assert answer.json()["error"]["type"] == "BadGatewayError"


async def test_attempts_are_bounded() -> None:
    async with running(4, limits={"max_attempts": 2}) as cluster:
        for node in cluster.nodes:
            node.engine.faults.set("die_before_token")
        assert (await cluster.http.post(CHAT, json=chat("a"))).status_code == 502
        assert len(cluster.core.log) == 2


async def read_until_cut(cluster: Cluster, lines: list[str], kill_after: int | None) -> None:
    body = chat("long", max_tokens=5000, stream=True)
    async with cluster.http.stream("POST", CHAT, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            lines.append(line)
            if len(lines) == kill_after:
                await cluster.serving().kill()


@pytest.mark.parametrize("end", ["kill", "die_mid_stream"])
async def test_a_stream_whose_replica_dies_is_cut_and_never_looks_whole(end: str) -> None:
    async with running(2, decode_tokens_per_s=100.0) as cluster:
        if end != "kill":
            for node in cluster.nodes:
                node.engine.faults.set(end, after_tokens=3)
        lines: list[str] = []
        with pytest.raises(httpx.RemoteProtocolError):
            await read_until_cut(cluster, lines, kill_after=5 if end == "kill" else None)
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert chunks
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        await until(cluster.at_rest)
        assert 'upstream_errors_total{kind="ClosedMidBody"} 1.0' in (await cluster.http.get("/metrics")).text


@streamed_or_whole
async def test_a_replica_that_hangs_is_given_up_after_the_time_limit(stream: bool) -> None:
    limits = {"first_token_timeout_s": 0.2} if stream else {"answer_timeout_s": 0.2}
    async with running(1, limits=limits) as cluster:
        cluster.nodes[0].engine.faults.set("hang", count=1)
        answer = await cluster.http.post(CHAT, json=chat("a", stream=stream))
        assert answer.status_code == 504
        assert ("first token" if stream else "answer") in answer.json()["error"]["message"]
        assert [d.measured.status for d in cluster.core.log if d.measured] == [504]
        assert (await cluster.http.post(CHAT, json=chat("a", stream=stream))).status_code == 200


async def test_a_replica_that_takes_no_connection_gets_nothing_new_though_its_stream_is_open(
    cluster: Cluster,
) -> None:
    deaf, other = cluster.nodes
    await deaf.stop_listening()
    assert cluster.router.knows(cluster.nodes)
    answers = [await cluster.http.post(CHAT, json=chat(f"t{number}")) for number in range(4)]
    assert {answer.headers["x-manta-replica"] for answer in answers} == {other.id}
    # One request met the closed port; the others were not sent there at all.
    assert sum(d.choice is not None and d.choice.replica == deaf.id for d in cluster.core.log) == 1
    assert cluster.router.knows([other])


async def test_a_replica_that_leaves_serves_list_finishes_what_it_has(cluster: Cluster) -> None:
    async with cluster.http.stream("POST", CHAT, json=chat("a", max_tokens=2000, stream=True)) as answer:
        node = cluster.node(answer.headers["x-manta-replica"])
        cluster.core.set_pool("unified", [each.info for each in cluster.nodes if each is not node])
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"


async def test_a_sick_replica_gets_nothing_new_and_recovers(cluster: Cluster) -> None:
    sick, *others = cluster.nodes
    sick.hosted.sick = True
    await until(lambda: sick.id not in [entry.info.id for entry in cluster.core.directory.ready()])
    for number in range(6):
        answer = await cluster.http.post("/v1/completions", json=prompt(words(200, f"s{number}")))
        assert answer.headers["x-manta-replica"] in [node.id for node in others]
    sick.hosted.sick = False
    await until(lambda: sick.id in [entry.info.id for entry in cluster.core.directory.ready()])
