"""Policies over time: prefixes attract, load repels, and nobody is overrun."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest

from router.candidates import Candidates
from router.policies import Choice, Policy, PredictedTtftPolicy, RoundRobinPolicy, RouteRequest
from router.policies.picking import choice_of
from tests.unit.policy_kit import REPLICAS, Prompt, SimulatedCluster, closed_loop

PREDICTED = PredictedTtftPolicy()


def test_64_simultaneous_distinct_long_prompts_take_8_of_each_replica() -> None:
    cluster = SimulatedCluster(PREDICTED)
    for number in range(64):
        labels = tuple(f"{number}/{chunk}" for chunk in range(32))
        cluster.at(0.0, partial(cluster.send, Prompt(f"r{number}", labels), 1.0))
    cluster.run()
    assert Counter(cluster.chosen.values()) == dict.fromkeys(REPLICAS, 8)


@pytest.mark.parametrize("seed", range(10))
def test_64_simultaneous_prompts_of_different_lengths_take_8_of_each_give_or_take_one(seed: int) -> None:
    lengths = random.Random(seed)
    cluster = SimulatedCluster(PREDICTED)
    for number in range(64):
        prompt = Prompt(f"r{number}", (), lengths.randint(7000, 9000))
        cluster.at(0.0, partial(cluster.send, prompt, 1.0))
    cluster.run()
    counts = Counter(cluster.chosen.values())
    assert set(counts) == set(REPLICAS)
    assert set(counts.values()) <= {7, 8, 9}


@pytest.mark.parametrize("clients", [16, 32, 64])
def test_a_system_prompt_that_all_share_overruns_nobody(clients: int) -> None:
    draw = random.Random(clients)
    system = tuple(f"system/{chunk}" for chunk in range(16))
    prompts = [
        Prompt(
            f"r{n}", (*system, *(f"{n}/{chunk}" for chunk in range(draw.randint(0, 3)))), draw.randint(1, 255)
        )
        for n in range(400)
    ]
    cluster = SimulatedCluster(PREDICTED)
    closed_loop(cluster, prompts, clients, lambda: draw.uniform(0.2, 1.0))
    assert cluster.busiest_over_mean() <= 1.3
    assert cluster.cached_tokens / cluster.prompt_tokens > 0.7, "and the prefix is still used"


def test_without_a_load_term_the_shared_prefix_would_take_everyone() -> None:
    system = tuple(f"system/{chunk}" for chunk in range(16))
    prompts = [Prompt(f"r{n}", system, 1 + n % 200) for n in range(400)]

    class LongestMatch:
        def choose(self, request: RouteRequest, candidates: Candidates) -> Choice:
            return choice_of(request, candidates, candidates.usable(), -candidates.matched.astype(float))

    cluster = SimulatedCluster(LongestMatch())
    closed_loop(cluster, prompts, 4, lambda: 0.5)
    assert cluster.busiest_over_mean() > 1.9, "the simulation can show what the load term is for"


def test_conversations_stay_where_their_history_is() -> None:
    draw = random.Random(3)
    cluster = SimulatedCluster(PREDICTED)
    sessions, turns = 24, 8

    def take_turn(session: int, turn: int) -> None:
        labels = tuple(f"{session}/{chunk}" for chunk in range(8 * (turn + 1)))
        prompt = Prompt(f"{session}.{turn}", labels, 40)
        cluster.send(prompt, 0.5, lambda: think(session, turn + 1))

    def think(session: int, turn: int) -> None:
        if turn < turns:
            cluster.at(cluster.now + draw.uniform(0.5, 1.5), lambda: take_turn(session, turn))

    for session in range(sessions):
        cluster.at(draw.uniform(0, 2), partial(take_turn, session, 0))
    cluster.run()
    returned = sum(
        cluster.chosen[f"{s}.{turn}"] == cluster.chosen[f"{s}.{turn - 1}"]
        for s in range(sessions)
        for turn in range(1, turns)
    )
    assert returned / (sessions * (turns - 1)) > 0.95
    assert set(cluster.chosen.values()) == set(REPLICAS), "and conversations are shared out"


def test_equally_long_prompts_without_a_common_prefix_spread() -> None:
    prompts = [Prompt(f"r{n}", tuple(f"{n}/{chunk}" for chunk in range(8))) for n in range(400)]
    cluster = SimulatedCluster(PREDICTED)
    closed_loop(cluster, prompts, 16, lambda: 0.5)
    assert cluster.busiest_over_mean() <= 1.1


def test_affinity_reuses_far_more_than_round_robin() -> None:
    def hit_ratio(policy: Policy) -> float:
        draw = random.Random(5)
        cluster = SimulatedCluster(policy)
        groups = [f"document-{n}" for n in range(24)]
        prompts = [
            Prompt(f"r{n}", tuple(f"{group}/{chunk}" for chunk in range(12)), 30)
            for n, group in enumerate(draw.choices(groups, k=300))
        ]
        closed_loop(cluster, prompts, 12, lambda: draw.uniform(0.1, 0.5))
        return cluster.cached_tokens / cluster.prompt_tokens

    assert hit_ratio(PREDICTED) > 1.5 * hit_ratio(RoundRobinPolicy())


def test_round_robin_takes_turns() -> None:
    cluster = SimulatedCluster(RoundRobinPolicy(), REPLICAS[:3])
    closed_loop(cluster, [Prompt(f"r{n}", ("same",)) for n in range(9)], 1, lambda: 0.1)
    chosen = [cluster.chosen[f"r{n}"] for n in range(9)]
    assert set(chosen[:3]) == set(REPLICAS[:3])
    assert chosen == chosen[:3] * 3
