"""Clients that leave: the engine stops, and nothing of their requests stays anywhere."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.integration.in_process import Cluster, chat, running, until

CHAT = "/v1/chat/completions"
SLOW_PREFILL: dict[str, Any] = {"prefill_overhead_s": 600.0}
SLOW_DECODE: dict[str, Any] = {"decode_tokens_per_s": 0.5}
ONE_PLACE: dict[str, Any] = {"max_requests_per_replica": 1}


async def ask(cluster: Cluster, stream: bool = True, max_tokens: int = 5000) -> httpx.Response:
    return await cluster.http.post(CHAT, json=chat("a", max_tokens=max_tokens, stream=stream))


async def leave(*asking: asyncio.Task[httpx.Response]) -> None:
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_stops_the_engine_wherever_it_is(phase: str, stream: bool) -> None:
    async with running(1, **(SLOW_PREFILL if phase == "prefill" else SLOW_DECODE)) as cluster:
        (node,) = cluster.nodes
        asking = asyncio.create_task(ask(cluster, stream))
        made = node.engine.counters
        await until(lambda: node.engine.load().running and (phase == "prefill" or made.generated_tokens))
        await leave(asking)
        await until(cluster.at_rest)
        assert made.aborted == 1
        assert node.engine.load().kv_used == 0
        (decision,) = cluster.core.log
        assert decision.measured is not None
        assert decision.measured.status == (200 if stream and phase == "decode" else 499)


async def test_a_client_that_leaves_the_routers_queue_is_forgotten() -> None:
    async with running(1, limits=ONE_PLACE, **SLOW_DECODE) as cluster:
        asking = [asyncio.create_task(ask(cluster)) for _ in range(3)]
        await until(lambda: len(cluster.core.room) == 2 and cluster.nodes[0].busy == 1)
        (held,) = [task for task in asking if not task.done()][:1]
        await leave(asking[2], asking[1])
        await until(lambda: len(cluster.core.room) == 0)
        assert cluster.nodes[0].busy == 1
        await leave(held)


async def test_a_client_that_leaves_the_engines_queue_is_forgotten() -> None:
    async with running(1, max_running=1, **SLOW_DECODE) as cluster:
        (node,) = cluster.nodes
        asking = [asyncio.create_task(ask(cluster)) for _ in range(3)]
        await until(lambda: (node.engine.load().running, node.engine.load().waiting) == (1, 2))
        await leave(*asking)
        await until(cluster.at_rest)


async def test_a_client_that_leaves_inside_its_body_costs_nothing(cluster: Cluster) -> None:
    host, _, port = cluster.router.server.addresses[0].rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await until(lambda: cluster.router.server.connections == 1)
    writer.close()
    await until(lambda: cluster.router.server.connections == 0)
    assert len(cluster.core.log) == 0
    text = cluster.core.metrics.render().decode()
    assert 'requests_total{path="/v1/completions",status="499"} 1.0' in text


async def test_after_an_abort_storm_throughput_is_back_and_nothing_is_left() -> None:
    limits = {"max_requests_per_replica": 100}
    async with running(4, routers=2, limits=limits, decode_tokens_per_s=20.0, max_running=200) as cluster:
        draw = random.Random(5)
        asking = [asyncio.create_task(ask(cluster, draw.random() < 0.5)) for _ in range(500)]
        await until(lambda: cluster.core.ledger.open_requests() == 400 and len(cluster.core.room) == 100)
        await until(lambda: sum(node.busy for node in cluster.nodes) == 400)
        cancelled = draw.sample(asking, 450)
        await leave(*cancelled)
        await until(lambda: sum(node.busy for node in cluster.nodes) == 50)
        async with asyncio.timeout(5):
            fresh = await asyncio.gather(*(ask(cluster, max_tokens=8) for _ in range(100)))
        assert {answer.status_code for answer in fresh} == {200}
        await leave(*asking)
        await until(cluster.at_rest)
        cluster.check_integrity()
        await until(lambda: all(router.knows(cluster.nodes) for router in cluster.routers))
        await cluster.http.aclose()
        await until(lambda: cluster.router.server.connections == 0)
        kept = cluster.router.app._relay.pool._idle.values()
        for node in cluster.nodes:
            assert node.hosted.publisher.subscriptions == len(cluster.routers)
        await until(
            lambda: (
                sum(node.server.connections for node in cluster.nodes)
                == sum(map(len, kept)) + len(cluster.nodes) * len(cluster.routers)
            )
        )
