"""Other routers' rules that policies are compared with: that they are what they are called."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.policy_rivals import ConsistentHash, OverlapPlusLoad, RayPrefixAffinity, WeightedScores
from benchmarks.policy_workloads import Case, agentic_case, busy_seconds, cluster, shared_prefix_case
from cluster.simulation.config import SimulationConfig
from cluster.simulation.simulator import Simulator
from cluster.simulation.summary import summarise
from cluster.simulation.workload import chunk_key
from router.candidates import Candidate, Candidates
from router.choice import RouteRequest

CHUNK = 512


def request(tokens: int = 10 * CHUNK, session: str = "") -> RouteRequest:
    return RouteRequest("r", tokens, None, session)


def replicas(*rows: Candidate) -> Candidates:
    return Candidates.of(rows or [Candidate(f"replica-{number}") for number in range(4)])


def prompt(*blocks: int) -> Sequence[bytes]:
    return [chunk_key(block) for block in blocks]


def chosen(rule: object, candidates: Candidates, blocks: Sequence[int] = range(10), session: str = "") -> str:
    choice = rule.decide(request(session=session), prompt(*blocks), candidates)  # type: ignore[attr-defined]
    assert choice is not None
    return str(choice.replica)


def test_rays_rule_follows_the_longest_prefix_that_it_has_sent_somewhere() -> None:
    rule = RayPrefixAffinity(CHUNK)
    first = chosen(rule, replicas())
    busy = replicas(
        *(Candidate(f"replica-{n}", running=50 if f"replica-{n}" == first else 0) for n in range(4))
    )
    assert chosen(rule, busy) == first


def test_rays_rule_sends_what_matches_less_than_a_tenth_to_who_got_least() -> None:
    rule = RayPrefixAffinity(CHUNK)
    homes = {chosen(rule, replicas(), range(start, start + 10)) for start in range(0, 400, 100)}
    assert len(homes) == 4


def test_rays_rule_can_heed_imbalance() -> None:
    rule = RayPrefixAffinity(CHUNK, imbalanced=10)
    first = chosen(rule, replicas())
    busy = replicas(
        *(Candidate(f"replica-{n}", running=50 if f"replica-{n}" == first else 0) for n in range(4))
    )
    assert chosen(rule, busy) != first


def test_the_hash_keeps_what_begins_alike_together_and_spreads_the_rest() -> None:
    rule = ConsistentHash()
    assert chosen(rule, replicas(), [1, 2, 3]) == chosen(rule, replicas(), [1, 2, 9, 10])
    assert len({chosen(rule, replicas(), [1, start]) for start in range(100, 140)}) == 4


def test_the_hash_moves_few_when_a_replica_leaves() -> None:
    rule = ConsistentHash()
    four = replicas()
    three = replicas(*(Candidate(f"replica-{number}") for number in range(3)))
    before = [chosen(rule, four, [1, start]) for start in range(200)]
    after = [chosen(rule, three, [1, start]) for start in range(200)]
    moved = sum(a != b for a, b in zip(before, after, strict=True))
    assert moved == before.count("replica-3")


def test_the_hash_passes_over_a_replica_with_more_than_its_share() -> None:
    rule = ConsistentHash(bound=1.25)
    home = chosen(rule, replicas(), [1, 2])
    loaded = replicas(
        *(Candidate(f"replica-{n}", running=9 if f"replica-{n}" == home else 1) for n in range(4))
    )
    assert chosen(rule, loaded, [1, 2]) != home


def test_overlap_plus_load_weighs_missing_blocks_against_blocks_in_use() -> None:
    rule = OverlapPlusLoad(blocks=100, chunk_tokens=CHUNK)
    holder = Candidate("holder", matched=10 * CHUNK, kv_used=0.05)
    assert chosen(rule, replicas(holder, Candidate("idle"))) == "holder"
    full = Candidate("holder", matched=10 * CHUNK, kv_used=0.2)
    assert chosen(rule, replicas(full, Candidate("idle"))) == "idle"


def test_weighted_scores_add_prefix_queue_and_kv_use() -> None:
    rule = WeightedScores()
    holder = Candidate("holder", matched=10 * CHUNK, kv_used=0.9)
    assert chosen(rule, replicas(holder, Candidate("idle"))) == "holder"
    queued = Candidate("holder", matched=10 * CHUNK, kv_used=0.9, waiting=5)
    assert chosen(rule, replicas(queued, Candidate("idle"))) == "idle"


@pytest.mark.parametrize(
    "rule", [RayPrefixAffinity(CHUNK), ConsistentHash(), OverlapPlusLoad(9, CHUNK), WeightedScores()]
)
def test_no_rule_picks_a_replica_that_drains(rule: object) -> None:
    assert rule.decide(request(), prompt(1), replicas(Candidate("a", draining=True))) is None  # type: ignore[attr-defined]
    assert chosen(rule, replicas(Candidate("a", draining=True), Candidate("b"))) == "b"


def test_a_hundred_percent_is_what_endless_caches_and_full_batches_get_through() -> None:
    case = shared_prefix_case(400)
    assert isinstance(case, Case)
    config: SimulationConfig = case.config.model_copy(update={"blocks": 100_000})
    workload = case.workload(1.0)
    last = max(request.at_s for request in workload.arrivals())
    assert last == pytest.approx(busy_seconds(workload, case.config) / case.config.replicas, rel=0.15)
    found = summarise("any", config, 0.0, Simulator(config, workload).run())
    assert found.duration_s < 2 * last


def test_cases_share_the_store_out_over_the_nodes() -> None:
    config = cluster(16, 1000, store=True)
    assert 2 * config.tiers.dram == pytest.approx(50_000 * config.chunk_bytes, rel=0.01)
    assert agentic_case(store=False).config.tiers.dram == 0
