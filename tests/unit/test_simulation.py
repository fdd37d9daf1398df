"""The simulator: what must hold of every run, whatever is simulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.simulation.ceiling import all_requests, ceiling
from cluster.simulation.config import (
    AgenticLoad,
    Autoscaling,
    EngineTimes,
    Failure,
    PrefillPool,
    SharedPrefixLoad,
    SimulationConfig,
    TiersConfig,
)
from cluster.simulation.generators import Agentic, SharedPrefix
from cluster.simulation.records import OUTCOMES, SOURCES, Records
from cluster.simulation.simulator import Outcomes, Simulator
from cluster.simulation.summary import Summary, summarise
from cluster.simulation.workload import Request, Workload
from router.config import PolicyConfig
from router.policies import KINDS

CHUNK = 16
CHUNK_BYTES = CHUNK * 131_072


class Given(Workload):
    """Requests as they stand in a list."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self.requests = len(requests)

    def arrivals(self) -> Iterator[Request]:
        return iter(self._requests)


def config(**fields: Any) -> SimulationConfig:
    return SimulationConfig(**({"replicas": 2, "blocks": 64, "chunk_tokens": CHUNK} | fields))


def run(settings_: SimulationConfig, workload: Workload) -> tuple[Simulator, Outcomes]:
    simulator = Simulator(settings_, workload)
    outcomes = simulator.run()
    check(simulator)
    return simulator, outcomes


def check(simulator: Simulator) -> None:
    for engine in simulator.engines:
        engine.check_integrity()
        assert engine.jobs() == []
    simulator.stores.check_integrity()
    simulator.router.index.check_integrity()
    simulator.router.ledger.check_integrity()
    assert simulator.router.ledger.open_requests() == 0


def outcomes_of(records: Records) -> list[str]:
    return [OUTCOMES[kind] for kind in records.outcome]


def figures(settings_: SimulationConfig, workload: Workload) -> Summary:
    most = ceiling(all_requests(workload), settings_.chunk_tokens)
    return summarise("any", settings_, most, run(settings_, workload)[1])


def conversations(seed: int, count: int = 60, sessions: int = 6, gap_s: float = 0.5) -> Given:
    """Prompts of a few sessions that grow turn by turn, all of which begin with the same two chunks."""
    draw = random.Random(seed)
    lengths = dict.fromkeys(range(1, sessions + 1), 2)
    requests, at = [], 0.0
    for _ in range(count):
        session = draw.randrange(1, sessions + 1)
        lengths[session] = min(lengths[session] + draw.randrange(4), 30)
        blocks = [1, 2, *range(session * 1000, session * 1000 + lengths[session] - 2)]
        rest = draw.randrange(CHUNK)
        at += draw.expovariate(1 / gap_s)
        tokens = max(1, len(blocks) * CHUNK + rest)
        requests.append(Request(at, tokens, draw.randrange(1, 40), blocks, session=session))
    return Given(requests)


@st.composite
def workloads(draw: Callable[..., Any]) -> Given:
    """Few blocks, so that prompts share beginnings, and prompts up to larger than a replica."""
    requests, at = [], 0.0
    for _ in range(draw(st.integers(1, 25))):
        at += draw(st.sampled_from((0.0, 0.001, 0.3, 5.0)))
        start = draw(st.integers(0, 3)) * 100
        blocks = list(range(start, start + draw(st.integers(0, 20))))
        rest = draw(st.integers(0 if blocks else 1, CHUNK - 1))
        tokens, output = len(blocks) * CHUNK + rest, draw(st.integers(1, 60))
        filled = (tokens + output) // CHUNK - len(blocks)
        answer = [start + 50 + number for number in range(filled)] if draw(st.booleans()) else []
        requests.append(Request(at, tokens, output, blocks, answer))
    return Given(requests)


@given(
    workload=workloads(),
    replicas=st.integers(1, 3),
    blocks=st.integers(4, 40),
    dram=st.integers(0, 12),
    disk=st.sampled_from((0, 5, 40)),
    remote=st.sampled_from((0, 8)),
    prefill=st.integers(0, 2),
    failure=st.none() | st.floats(0, 6),
    policy=st.sampled_from(sorted(KINDS)),
    eviction=st.sampled_from(("lru", "s3fifo", "cost")),
)
@settings(max_examples=60, deadline=None)
def test_every_request_ends_once_and_every_prompt_token_is_hit_or_computed(
    workload: Given, replicas: int, blocks: int, dram: int, disk: int, remote: int, prefill: int,
    failure: float | None, policy: str, eviction: str,
) -> None:  # fmt: skip
    tiers = TiersConfig(
        dram=dram * CHUNK_BYTES,
        disk=disk * CHUNK_BYTES,
        remote=remote * CHUNK_BYTES,
        dram_eviction=eviction,
        disk_eviction=eviction,
    )
    cluster = config(
        replicas=replicas, blocks=blocks, replicas_per_node=2, tiers=tiers, policy=PolicyConfig(kind=policy),
        prefill_pool=PrefillPool(replicas=prefill) if prefill else None,
        failures=() if failure is None else (Failure(replica=0, at_s=failure, back_s=failure + 4),),
    )  # fmt: skip
    _, outcomes = run(cluster, workload)
    records = outcomes.records
    assert sorted(records.number) == list(range(1, workload.requests + 1))
    for place, outcome in enumerate(outcomes_of(records)):
        cached = sum(records.cached[source][place] for source in SOURCES)
        arrived, decided = records.arrived_s[place], records.decided_s[place]
        first, ended = records.first_s[place], records.ended_s[place]
        if outcome == "refused":
            assert -(-(records.prompt_tokens[place] + records.output_tokens[place]) // CHUNK) > blocks
        else:
            assert cached + records.computed[place] == records.prompt_tokens[place]
            assert records.computed[place] >= 1, "the last token of a prompt is always computed"
            assert arrived <= decided < first <= ended


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_equal_input_gives_equal_figures(kind: str) -> None:
    cluster = config(policy=PolicyConfig(kind=kind), tiers=TiersConfig(dram=40 * CHUNK_BYTES))
    assert figures(cluster, conversations(3)) == figures(cluster, conversations(3))


def test_one_replica_with_endless_room_hits_what_a_cache_without_bounds_hits() -> None:
    # One after the other: a prompt that is being computed can't be hit yet.
    workload = conversations(7, gap_s=30.0)
    found = figures(config(replicas=1, blocks=100_000), workload)
    assert found.hit == pytest.approx(found.ceiling)
    assert 0.5 < found.hit < 1


def test_a_ceiling_counts_leading_chunks_and_never_the_last_token() -> None:
    def asks(tokens: int, *blocks: int) -> Request:
        return Request(0.0, tokens, 1, blocks)

    requests = [asks(40, 1, 2), asks(40, 1, 2), asks(32, 1, 2), asks(48, 9, 2, 3)]
    # 32 of the second; of the third the first chunk alone, since its last token is computed; none of the fourth.
    assert ceiling(requests, CHUNK) == (32 + 16) / (40 + 40 + 32 + 48)


def test_no_policy_hits_more_than_the_ceiling() -> None:
    for kind in sorted(KINDS):
        tiers = TiersConfig(dram=10_000 * CHUNK_BYTES)
        found = figures(config(policy=PolicyConfig(kind=kind), tiers=tiers), conversations(5))
        assert found.hit <= found.ceiling + 1e-9


def test_a_store_that_both_replicas_load_from_makes_up_for_the_one_that_computed_it() -> None:
    apart = figures(config(policy=PolicyConfig(kind="round_robin")), conversations(1, gap_s=20.0))
    tiers = TiersConfig(dram=10_000 * CHUNK_BYTES, from_dram={"latency_s": 0, "bytes_per_s": 10**12})
    shared = figures(
        config(policy=PolicyConfig(kind="round_robin"), tiers=tiers), conversations(1, gap_s=20.0)
    )
    assert apart.hit < shared.hit == pytest.approx(shared.ceiling)
    assert shared.hits["dram"] > 0
    assert shared.moved_bytes["from dram"] > 0
    assert shared.computed_tokens < apart.computed_tokens


def test_another_nodes_memory_and_the_disk_are_sources_of_their_own() -> None:
    fast = {"latency_s": 0, "bytes_per_s": 10**13}
    tiers = TiersConfig(
        dram=20 * CHUNK_BYTES, disk=10_000 * CHUNK_BYTES, disk_admission="always",
        from_dram=fast, from_peer=fast, from_disk=fast,
    )  # fmt: skip
    cluster = config(policy=PolicyConfig(kind="round_robin"), tiers=tiers, replicas_per_node=1, blocks=40)
    found = figures(cluster, conversations(2, count=120, gap_s=20.0))
    assert found.hits["peer"] > 0
    assert found.hits["disk"] > 0
    assert found.moved_bytes["written to disk"] > 0


def test_a_tier_too_slow_to_beat_computing_is_not_loaded_from() -> None:
    slow = {"latency_s": 5, "bytes_per_s": 1000}
    tiers = TiersConfig(dram=10_000 * CHUNK_BYTES, from_dram=slow)
    found = figures(
        config(policy=PolicyConfig(kind="round_robin"), tiers=tiers), conversations(1, gap_s=20.0)
    )
    assert found.hits["dram"] == 0


def test_a_longer_prompt_takes_longer_and_a_cached_one_less() -> None:
    def ttft(*requests: Request) -> float:
        records = run(config(replicas=1, blocks=1000), Given(requests))[1].records
        return records.first_s[-1] - records.arrived_s[-1]

    short, long = list(range(10)), list(range(200))
    assert ttft(Request(0.0, 161, 2, short)) < ttft(Request(0.0, 3201, 2, long))
    before = Request(0.0, 3201, 2, long)
    assert ttft(before, Request(100.0, 3201, 2, long)) < ttft(before) / 10


def test_a_prefill_holds_up_the_streams_beside_it() -> None:
    def longest(*requests: Request) -> float:
        return run(config(replicas=1, blocks=5000), Given(requests))[1].gaps.percentiles((1.0,))[0]

    stream = Request(0.0, 16, 200, [1])
    assert longest(stream) < longest(stream, Request(0.5, 16_001, 1, range(100, 1100))) / 5


def test_streams_beyond_the_seats_wait_for_one() -> None:
    requests = [Request(0.0, 16, 100, [number]) for number in range(4)]
    engine = config().engine.model_copy(update={"max_running": 2})
    records = run(config(replicas=1, engine=engine), Given(requests))[1].records
    first = sorted(records.first_s)
    assert first[1] < min(records.ended_s) <= first[2]


def test_a_prompt_that_no_replica_has_room_for_is_refused_and_the_others_go_on() -> None:
    requests = [Request(0.0, 64 * CHUNK, 1, range(64)), Request(0.0, CHUNK, 1, [500])]
    records = run(config(), Given(requests))[1].records
    assert sorted(outcomes_of(records)) == ["answered", "refused"]


def test_what_a_replica_had_is_lost_when_it_dies_and_its_requests_go_elsewhere() -> None:
    waiting = [
        Request(0.0, 2000 * CHUNK, 500, range(number * 5000, number * 5000 + 2000)) for number in range(4)
    ]
    cluster = config(blocks=5000, failures=(Failure(replica=0, at_s=0.5, back_s=50.0),))
    records = run(cluster, Given(waiting))[1].records
    assert outcomes_of(records) == ["answered"] * 4
    assert set(records.replica) == {1}
    assert max(records.attempts) == 2


def test_a_stream_breaks_off_with_its_replica() -> None:
    requests = [Request(0.0, CHUNK, 2000, [number * 500]) for number in range(2)]
    cluster = config(blocks=500, failures=(Failure(replica=1, at_s=5.0),))
    found = figures(cluster, Given(requests))
    assert (found.answered, found.broken) == (1, 1)


def test_requests_wait_for_a_replica_while_none_lives() -> None:
    cluster = config(replicas=1, failures=(Failure(replica=0, at_s=1.0, back_s=60.0),))
    records = run(cluster, Given([Request(10.0, CHUNK, 2, [1])]))[1].records
    assert outcomes_of(records) == ["answered"]
    assert records.first_s[0] > 60


def test_requests_are_refused_when_no_replica_will_ever_come() -> None:
    cluster = config(replicas=1, failures=(Failure(replica=0, at_s=1.0),))
    assert outcomes_of(run(cluster, Given([Request(10.0, CHUNK, 2, [1])]))[1].records) == ["refused"]


def test_prompts_are_computed_in_the_prefill_pool_and_answered_by_the_others() -> None:
    cluster = config(prefill_pool=PrefillPool(replicas=1), blocks=200)
    simulator, outcomes = run(cluster, conversations(4))
    records = outcomes.records
    assert set(outcomes_of(records)) == {"answered"}
    # An answer of one token is there when its prompt is computed.
    by_length = zip(records.output_tokens, records.replica, strict=True)
    assert {replica for output, replica in by_length if output > 1} == {0, 1}
    assert outcomes.moved.transferred > 0
    assert simulator.engines[2].prefill_rate > 0
    assert [engine.prefill_rate for engine in simulator.engines[:2]] == [0.0, 0.0]


def test_a_prefill_pool_keeps_prompts_from_holding_up_streams() -> None:
    many = Given(
        [
            Request(number / 2, 401 * CHUNK, 300, range(number * 500, number * 500 + 401))
            for number in range(40)
        ]
    )
    # Chunked prefills: each holds up a dozen steps of those that decode beside it.
    engine = EngineTimes(step_tokens=512)
    together = figures(config(replicas=3, blocks=5000, engine=engine), many)
    apart = figures(
        config(replicas=2, blocks=5000, engine=engine, prefill_pool=PrefillPool(replicas=1)), many
    )
    assert apart.itl.p99 < together.itl.p99 / 2
    assert apart.ttft.p50 > together.ttft.p50, "the transfer is not free"


def test_replicas_come_with_demand_and_go_without_it() -> None:
    burst = [Request(10.0 + number / 50, CHUNK, 400, [number]) for number in range(80)]
    late = [Request(2000.0, CHUNK, 2, [1])]
    scaling = Autoscaling(max_replicas=4, target_requests=10, start_s=5, interval_s=1, downscale_delay_s=60)
    fixed = figures(config(replicas=4, blocks=2000), Given(burst + late))
    scaled = figures(config(replicas=1, blocks=2000, autoscaling=scaling), Given(burst + late))
    assert scaled.most_replicas == 4
    assert scaled.answered == fixed.answered == 81
    assert scaled.gpu_seconds < 0.5 * fixed.gpu_seconds
    assert scaled.gpu_seconds > 2000


def test_gpu_seconds_are_those_of_all_replicas_while_it_lasts() -> None:
    found = figures(config(replicas=2), conversations(1))
    assert found.gpu_seconds == pytest.approx(2 * found.duration_s)


def test_an_agents_next_turn_comes_after_its_answer_and_finds_it_cached() -> None:
    load = AgenticLoad(
        sessions=3, turns=4, common_tokens=64, first_tokens=64, turn_tokens=32, output_tokens=32, ramp_s=30.0
    )
    workload = Agentic(load, CHUNK, seed=1)
    _, outcomes = run(config(replicas=1, blocks=10_000), workload)
    records = outcomes.records
    assert len(records) == workload.requests == 12
    # A last turn's prompt is 64 + 64 + 3 * (32 + 32); all but what the user adds had been there.
    lengths = sorted(zip(records.prompt_tokens, records.cached["hbm"], strict=True))
    assert lengths[-1] == (320, 288)


def test_groups_share_their_prefix_and_nothing_else() -> None:
    load = SharedPrefixLoad(
        groups=2, users=3, prefix_tokens=160, suffix_tokens=80, output_tokens=4, requests=12, rate=0.01
    )
    found = figures(config(replicas=1, blocks=10_000), SharedPrefix(load, CHUNK, seed=0))
    assert found.hit == pytest.approx(found.ceiling)
    assert found.hit == pytest.approx(10 * 160 / (12 * 240))


def test_busiest_over_mean_is_one_when_work_is_even_and_the_number_of_replicas_when_one_does_all() -> None:
    steady = Given([Request(float(number), CHUNK, 1, [number]) for number in range(200)])
    even = figures(config(policy=PolicyConfig(kind="round_robin")), steady)
    assert even.balance_p99 == pytest.approx(1.0, abs=0.05)
    session = Given([request._replace(session=1) for request in steady.arrivals()])
    one_sided = figures(config(policy=PolicyConfig(kind="session")), session)
    assert one_sided.balance_p50 == pytest.approx(2.0)
