"""Load spreads, whatever the prompts have in common."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.integration.in_process import Cluster, chat, prompt, running, until, words

weighing = pytest.mark.parametrize(
    "router",
    [{"policy": {"kind": kind}} for kind in ("prefix_affinity", "predicted_ttft")],
    ids=["tokens", "seconds"],
)


async def serve_all(
    cluster: Cluster, path: str, bodies: Sequence[dict[str, Any]], at_once: int
) -> Counter[str]:
    """Requests by the replica that answered."""
    room = asyncio.Semaphore(at_once)

    async def ask(body: dict[str, Any]) -> str:
        async with room:
            answer = await cluster.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.headers["x-manta-replica"])

    return Counter(await asyncio.gather(*map(ask, bodies)))


@weighing
async def test_a_burst_of_distinct_long_prompts_is_shared_out_evenly_over_idle_replicas(
    router: dict[str, Any],
) -> None:
    async with running(8, router=router, prefill_tokens_per_s=50_000.0) as cluster:
        bodies = [prompt(words(2000, f"{number:03}")) for number in range(64)]
        served = await serve_all(cluster, "/v1/completions", bodies, at_once=64)
        assert len(served) == 8
        assert all(7 <= count <= 9 for count in served.values()), served


@weighing
async def test_token_ids_of_equal_length_with_no_prefix_in_common_spread(router: dict[str, Any]) -> None:
    async with running(4, router=router, prefill_tokens_per_s=100_000.0) as cluster:
        draw = random.Random(7)
        bodies = [prompt([draw.randrange(1000) for _ in range(500)]) for _ in range(80)]
        served = await serve_all(cluster, "/v1/completions", bodies, at_once=8)
        assert len(served) == 4
        assert max(served.values()) <= 1.3 * 80 / 4, served


@weighing
async def test_a_long_system_prompt_that_all_traffic_shares_pulls_nobody_to_one_replica(
    router: dict[str, Any],
) -> None:
    async with running(
        8, router=router, prefill_tokens_per_s=100_000.0, decode_tokens_per_s=400.0
    ) as cluster:
        system = {"role": "system", "content": words(4000, "sys")}
        bodies = [chat(words(50, f"{number:03}")) for number in range(400)]
        for body in bodies:
            body["messages"].insert(0, system)
        served = await serve_all(cluster, "/v1/chat/completions", bodies, at_once=32)
        assert max(served.values()) <= 1.3 * 400 / 8, served
        cached = [d.measured.cached_tokens for d in cluster.core.log if d.measured]
        # Every replica computed it once or so, and no more.
        assert sum(tokens > 3900 for tokens in cached) >= 350


async def test_a_prompt_that_is_computed_weighs_no_more_while_its_whole_answer_is_made() -> None:
    async with running(2, decode_tokens_per_s=0.5) as cluster:
        body = prompt(words(2000, "long"), max_tokens=500)
        asking = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
        await until(lambda: any(node.busy for node in cluster.nodes))
        node = cluster.serving()
        await until(lambda: cluster.core.ledger.load(node.id).prefill_tokens == 0)
        await until(lambda: cluster.router.knows(cluster.nodes))
        assert cluster.core.ledger.load(node.id).running == 1
        answer = await cluster.http.post("/v1/completions", json=body | {"max_tokens": 1})
        assert answer.headers["x-manta-replica"] == node.id
        asking.cancel()
