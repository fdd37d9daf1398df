"""What a router predicts is what requests then take, on engines whose speed it is not told and which change it."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections.abc import Iterable
from string import ascii_lowercase

import numpy as np
import pytest

from router.decision_log import Decision
from tests.integration.in_process import Cluster, Node, prompt, running, until, words
from workers.sim.latency import LatencyModel

# In real time: a machine that is busy with something else adds errors that are not the router's.
pytestmark = pytest.mark.long

REQUESTS = 240
RATE = 14.0
"""Requests per second, a half of what the replicas could do at their slowest."""


class Hidden(LatencyModel):
    """Speeds that vary from prefill to prefill."""

    draw = random.Random(5)

    def prefill_s(self, tokens: int) -> float:
        return super().prefill_s(tokens) * math.exp(self.draw.gauss(0.0, 0.1))


def set_speed(nodes: Iterable[Node], tokens_per_s: float, overhead_s: float) -> None:
    for node in nodes:
        node.engine.scheduler._latency = Hidden(tokens_per_s, overhead_s, 50.0, 0.02)


def errors(decisions: Iterable[Decision]) -> list[float]:
    found = []
    for decision in decisions:
        assert decision.choice is not None
        assert decision.choice.predicted is not None
        assert decision.measured is not None
        measured = decision.measured.served_s
        assert measured is not None
        found.append(abs(decision.choice.predicted.ttft_s - measured) / measured)
    return found


async def ask(cluster: Cluster, draw: random.Random) -> None:
    """A prompt that begins as one of ten others do, answered as a stream."""
    own = "".join(draw.choices(ascii_lowercase, k=4 * draw.randrange(20, 400)))
    text = words(64 * draw.randrange(1, 12), draw.choice("abcdefghij")) + own
    body = prompt(text, stream=True, max_tokens=draw.randrange(1, 12))
    async with cluster.http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for _ in answer.aiter_bytes():
            pass


@pytest.mark.timeout(120)
async def test_predicted_and_measured_seconds_agree_on_engines_of_hidden_speed_that_change_it() -> None:
    draw = random.Random(11)
    async with running(4, router={"policy": {"kind": "predicted_ttft"}}) as cluster:
        set_speed(cluster.nodes, 4000.0, 0.03)
        async with asyncio.TaskGroup() as requests:
            for number in range(REQUESTS):
                if number == REQUESTS // 2:
                    set_speed(cluster.nodes, 2000.0, 0.06)
                requests.create_task(ask(cluster, draw))
                await asyncio.sleep(draw.expovariate(RATE))
        await until(cluster.at_rest)
        decisions = list(cluster.core.log)[-REQUESTS:]
        found = errors(decisions)[20:]
        assert statistics.median(found) <= 0.25
        assert np.quantile(found, 0.9) <= 0.60
        rendered = cluster.core.metrics.render().decode()
        assert f"manta_router_ttft_error_ratio_count {float(REQUESTS)}" in rendered
