"""The index of every router is what the engines hold, whatever happens on the way."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.integration.in_process import (
    CHUNK_TOKENS,
    Cluster,
    chat,
    prompt,
    running,
    start_node,
    until,
    words,
)
from workers.config import SimConfig


async def ask(cluster: Cluster, name: str, tokens: int = 4 * CHUNK_TOKENS) -> str:
    answer = await cluster.http.post("/v1/completions", json=prompt(words(tokens, name)))
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-manta-replica"])


async def test_what_a_prompt_and_its_answer_leave_in_an_engine_is_in_the_index(cluster: Cluster) -> None:
    answer = await cluster.http.post(
        "/v1/completions", json=prompt(words(CHUNK_TOKENS, "both"), max_tokens=2 * CHUNK_TOKENS + 1)
    )
    await until(lambda: cluster.router.knows(cluster.nodes))
    assert len(cluster.core.index.held(answer.headers["x-manta-replica"], "hbm")) == 3


@pytest.mark.parametrize("lost", [1, 3])
async def test_lost_deltas_are_noticed_without_further_ones_and_repaired_by_a_snapshot(lost: int) -> None:
    async with running(1, routers=2) as cluster:
        (node,) = cluster.nodes
        await ask(cluster, "kept")
        node.engine.faults.set("lose_delta", count=lost)
        for number in range(lost):
            await ask(cluster, f"l{number}")
        await until(lambda: node.engine.faults.kind == "none")
        await until(lambda: all(router.knows([node]) for router in cluster.routers))
        for router in cluster.routers:
            (entry,) = router.core.directory
            assert 1 <= entry.stream.snapshots <= lost
        await ask(cluster, "l0", tokens=5 * CHUNK_TOKENS)
        assert list(cluster.core.log)[-1].choice.matched_tokens == 4 * CHUNK_TOKENS  # type: ignore[union-attr]


async def test_the_index_stays_exact_under_eviction_and_random_traffic() -> None:
    async with running(3, routers=2, blocks=96, max_running=4) as cluster:
        draw = random.Random(11)
        room = asyncio.Semaphore(12)

        async def traffic() -> None:
            name, tokens = f"f{draw.randrange(8)}", draw.randrange(20, 1200)
            async with room:
                asking = asyncio.create_task(
                    cluster.http.post("/v1/completions", json=prompt(words(tokens, name), max_tokens=80))
                )
                if draw.random() < 0.2:
                    await asyncio.wait({asking}, timeout=draw.random() * 0.05)
                    asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

        await asyncio.gather(*(traffic() for _ in range(150)))
        await until(cluster.at_rest)
        await until(lambda: all(router.knows(cluster.nodes) for router in cluster.routers))
        computed = sum(node.engine.scheduler.computed_tokens for node in cluster.nodes)
        assert computed > 2 * 3 * 96 * 16, "nothing was evicted"
        for node in cluster.nodes:
            assert 0 < len(node.engine.chunks()) <= 96 * 16 // CHUNK_TOKENS


async def test_a_new_router_is_exact_and_two_stay_equal(cluster: Cluster) -> None:
    for number in range(6):
        await ask(cluster, f"p{number}")
    newcomer = await cluster.add_router()
    await until(lambda: newcomer.knows(cluster.nodes))
    for number in range(6, 12):
        await ask(cluster, f"p{number}")
    await until(lambda: all(router.knows(cluster.nodes) for router in cluster.routers))
    for node in cluster.nodes:
        held = [router.core.index.held(node.id, "hbm") for router in cluster.routers]
        assert held[0] == held[1] != set()


async def test_a_router_that_restarts_leaves_no_stream_behind(cluster: Cluster) -> None:
    await ask(cluster, "kept")
    old = cluster.routers.pop()
    await old.stop()
    await until(lambda: all(node.hosted.publisher.subscriptions == 0 for node in cluster.nodes))
    await cluster.add_router()
    await cluster.talk_to(cluster.router)
    await until(lambda: cluster.router.knows(cluster.nodes))
    assert all(node.hosted.publisher.subscriptions == 1 for node in cluster.nodes)
    assert len(cluster.core.log) == 0
    await ask(cluster, "kept", tokens=5 * CHUNK_TOKENS)
    assert list(cluster.core.log)[-1].choice.matched_tokens == 4 * CHUNK_TOKENS  # type: ignore[union-attr]


@pytest.mark.parametrize("life", ["same", "another"])
async def test_a_dead_replica_leaves_the_index_at_once_and_returns_exact(cluster: Cluster, life: str) -> None:
    for number in range(6):
        await ask(cluster, f"p{number}")
    await until(lambda: cluster.router.knows(cluster.nodes))
    dead, other = cluster.nodes
    assert dead.engine.chunks()
    await dead.kill()
    await until(lambda: cluster.router.knows([other]))
    assert {await ask(cluster, f"p{number}") for number in range(6)} == {other.id}
    await (dead.revive() if life == "same" else dead.restart())
    await until(lambda: cluster.router.knows(cluster.nodes))
    assert bool(dead.engine.chunks()) == (life == "same")
    assert {await ask(cluster, f"q{number}") for number in range(6)} == {dead.id, other.id}


async def test_a_replica_that_serve_no_longer_names_leaves_and_its_stream_ends(cluster: Cluster) -> None:
    left, other = cluster.nodes
    await ask(cluster, "p")
    cluster.core.set_pool("unified", [other.info])
    await until(lambda: cluster.router.knows([other]))
    await until(lambda: left.hosted.publisher.subscriptions == 0)
    cluster.core.set_pool("unified", [left.info, other.info])
    await until(lambda: cluster.router.knows(cluster.nodes))


async def test_another_replica_at_a_reused_address_is_not_taken_for_the_one_before(cluster: Cluster) -> None:
    stranger = await start_node("stranger", SimConfig())
    before = cluster.nodes[0].info
    try:
        moved = type(before)(
            **{name: getattr(before, name) for name in before.__struct_fields__}
            | {"address": stranger.info.address}
        )
        cluster.core.set_pool("unified", [moved, cluster.nodes[1].info])
        await until(lambda: cluster.router.knows([cluster.nodes[1]]))
        assert {await ask(cluster, f"p{number}") for number in range(4)} == {cluster.nodes[1].id}
        assert stranger.engine.counters.prompt_tokens == 0
    finally:
        await stranger.stop()


async def test_a_suspect_is_out_at_once_and_exact_when_it_is_heard_again(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    await ask(cluster, "p")
    await until(lambda: cluster.router.knows(cluster.nodes))
    cluster.core.directory.suspect(node.id)
    assert node.id not in {entry.info.id for entry in cluster.core.directory.ready()}
    assert cluster.core.index.held(node.id, "hbm") == set()
    await until(lambda: cluster.router.knows(cluster.nodes))
    await until(lambda: node.hosted.publisher.subscriptions == 1)


async def test_a_stream_that_breaks_before_its_load_report_leaves_nothing(cluster: Cluster) -> None:
    node, other = cluster.nodes
    while not node.engine.chunks():
        await ask(cluster, f"p{random.random()}")
    await node.silence()
    cluster.core.directory.suspect(node.id)
    await until(lambda: cluster.core.index.held(node.id, "hbm") == node.engine.chunks())
    assert [entry.info.id for entry in cluster.core.directory.ready()] == [other.id]
    await node.kill()
    await until(lambda: cluster.router.knows([other]))


async def test_configuration_changes_live_and_streams_go_on(cluster: Cluster) -> None:
    tasks = [entry.stream.task for entry in cluster.core.directory]
    cluster.router.configure(policy={"kind": "round_robin"}, limits={"max_requests_per_replica": 1})
    same = [await ask(cluster, "same") for _ in range(4)]
    assert same[0] != same[1]
    assert same[:2] == same[2:]
    cluster.router.configure(policy={"kind": "prefix_affinity"})
    first = await ask(cluster, "other")
    await until(lambda: cluster.router.knows(cluster.nodes))
    assert {await ask(cluster, "other") for _ in range(4)} == {first}
    assert [entry.stream.task for entry in cluster.core.directory] == tasks
    assert all(task is not None and not task.done() for task in tasks)


async def test_nothing_of_a_chat_is_lost_between_router_and_engine(cluster: Cluster) -> None:
    """The router's keys of a prompt are those of the blocks that the engine stored for it."""
    answer = await cluster.http.post("/v1/chat/completions", json=chat(words(300, "chat")))
    await until(lambda: cluster.router.knows(cluster.nodes))
    again = await cluster.http.post("/v1/chat/completions", json=chat(words(300, "chat")))
    assert again.headers["x-manta-replica"] == answer.headers["x-manta-replica"]
    first, second = cluster.core.log
    assert first.digest == second.digest
    assert second.choice is not None
    assert second.choice.matched_tokens == second.chunks * CHUNK_TOKENS == 256
