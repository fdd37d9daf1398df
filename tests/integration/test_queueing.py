"""Requests that wait for a replica: bounded in number and time, and served as soon as one has room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

import router.http
from tests.integration.in_process import Cluster, chat, http_client, running, until

CHAT = "/v1/chat/completions"
ONE_PLACE: dict[str, Any] = {"max_requests_per_replica": 1}
SLOW: dict[str, Any] = {"decode_tokens_per_s": 0.5}


def ask(cluster: Cluster, max_tokens: int = 8) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(cluster.http.post(CHAT, json=chat("a", max_tokens=max_tokens, stream=True)))


async def occupy(cluster: Cluster) -> Callable[[], object]:
    """Take the only place of the only replica. Call what comes back to give it up."""
    occupant = ask(cluster, 5000)
    await until(lambda: cluster.nodes[0].busy == 1)
    return occupant.cancel


@pytest.fixture
def eager_waking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.http, "_WAKE_PERIOD_S", 0.01)


async def test_over_the_queues_bound_clients_are_told_when_to_come_back() -> None:
    async with running(1, limits={**ONE_PLACE, "max_queue": 1}, **SLOW) as cluster:
        give_up = await occupy(cluster)
        waiting = ask(cluster, 1)
        await until(lambda: len(cluster.core.room) == 1)
        refused = await ask(cluster)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"] == {
            "message": "The cluster is busy: 1 requests wait for a replica, the limit is 1.",
            "type": "RateLimitError",
            "param": None,
            "code": 429,
        }
        async with cluster.openai() as client:
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(**chat("a"))
        assert 'decisions_total{outcome="queue_full"} 2.0' in (await cluster.http.get("/metrics")).text
        give_up()
        assert (await waiting).status_code == 200


async def test_who_waits_too_long_for_a_busy_replica_gets_a_429() -> None:
    async with running(1, limits={**ONE_PLACE, "queue_timeout_s": 0.1}, **SLOW) as cluster:
        give_up = await occupy(cluster)
        refused = await ask(cluster)
        assert refused.status_code == 429
        assert "retry-after" in refused.headers
        assert cluster.router.wakes == []
        give_up()


async def test_who_waits_too_long_for_any_replica_gets_a_503() -> None:
    async with running(1, limits={"queue_timeout_s": 0.1}) as cluster:
        cluster.core.set_pool("unified", [])
        refused = await ask(cluster)
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "ServiceUnavailableError"
        assert len(cluster.router.wakes) == 1


@pytest.mark.usefixtures("eager_waking")
async def test_a_replica_is_asked_for_as_long_as_requests_wait_and_it_serves_them_when_it_comes() -> None:
    async with running(1) as cluster:
        cluster.core.set_pool("unified", [])
        waiting = [ask(cluster) for _ in range(3)]
        await until(lambda: len(cluster.core.room) == 3)
        await until(lambda: len(cluster.router.wakes) > 5)
        cluster.core.set_pool("unified", [cluster.nodes[0].info])
        answers = await asyncio.gather(*waiting)
        assert {answer.status_code for answer in answers} == {200}
        asking = cluster.router.app._waking
        assert asking is not None
        await until(asking.done)


@pytest.mark.usefixtures("eager_waking")
async def test_nobody_is_asked_for_once_nobody_waits() -> None:
    async with running(1) as cluster:
        cluster.core.set_pool("unified", [])
        waiting = ask(cluster)
        await until(lambda: cluster.router.wakes)
        waiting.cancel()
        asking = cluster.router.app._waking
        assert asking is not None
        await until(asking.done)
        assert len(cluster.core.room) == 0


@pytest.mark.usefixtures("eager_waking")
async def test_asking_for_a_replica_goes_on_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(1) as cluster:
        attempts = []

        async def failing() -> None:
            attempts.append(1)
            raise RuntimeError("the controller is away")

        monkeypatch.setattr(cluster.router.app, "_wake", failing)
        cluster.core.set_pool("unified", [])
        waiting = ask(cluster)
        await until(lambda: len(attempts) > 2)
        cluster.core.set_pool("unified", [cluster.nodes[0].info])
        assert (await waiting).status_code == 200


async def test_a_place_that_becomes_free_goes_to_who_waits_first() -> None:
    async with running(1, limits=ONE_PLACE) as cluster:
        answers = await asyncio.gather(*(ask(cluster, 50) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert len(cluster.core.log) == 20


async def test_a_place_that_another_routers_request_leaves_is_noticed() -> None:
    async with running(1, routers=2, limits=ONE_PLACE, **SLOW) as cluster:
        give_up = await occupy(cluster)
        other = cluster.routers[1]
        (entry,) = other.core.directory
        await until(lambda: entry.load is not None and entry.load.http_requests == 1)
        async with http_client(base_url=other.url) as http:
            waiting = asyncio.create_task(http.post(CHAT, json=chat("a", max_tokens=1)))
            await until(lambda: len(other.core.room) == 1)
            give_up()
            assert (await waiting).status_code == 200


async def test_a_draining_replica_gets_nothing_new_and_finishes_what_it_has(cluster: Cluster) -> None:
    body = chat("a", max_tokens=4000, stream=True)
    async with cluster.http.stream("POST", CHAT, json=body) as answer:
        draining = cluster.node(answer.headers["x-manta-replica"])
        left = asyncio.create_task(draining.hosted.drain(timeout_s=60))
        await until(lambda: len(cluster.core.directory.ready()) == 1)
        entry = cluster.core.directory.get(draining.id)
        assert entry is not None
        assert cluster.core.directory.state(entry) == "draining"
        for _ in range(4):
            assert (await ask(cluster)).headers["x-manta-replica"] != draining.id
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert await left == 0


async def test_draining_ends_in_time_whatever_is_still_open() -> None:
    async with running(1, **SLOW) as cluster:
        give_up = await occupy(cluster)
        assert await cluster.nodes[0].hosted.drain(timeout_s=0.05) == 1
        give_up()


async def test_a_replica_that_was_silent_gets_the_requests_that_wait_once_it_is_heard(
    cluster: Cluster,
) -> None:
    cluster.skew_s += 1000
    assert cluster.core.directory.ready() == []
    assert (await ask(cluster)).status_code == 200
    await until(lambda: cluster.router.knows(cluster.nodes))


async def test_limits_change_while_requests_wait() -> None:
    async with running(1, limits=ONE_PLACE, **SLOW) as cluster:
        give_up = await occupy(cluster)
        waiting = ask(cluster, 1)
        await until(lambda: len(cluster.core.room) == 1)
        cluster.router.configure(limits={"max_requests_per_replica": 2})
        assert (await waiting).status_code == 200
        give_up()
