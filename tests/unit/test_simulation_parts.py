"""The simulator's parts: KV blocks, stores, engine steps, measured times, made loads, sizes, balance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cache_store.events import ChunkKey
from cluster.simulation.balance import balance
from cluster.simulation.block_pool import BlockPool, Lease
from cluster.simulation.config import EngineTimes, SimulationConfig, TiersConfig
from cluster.simulation.engine import Engine, Job
from cluster.simulation.engine_times import MeasurementError, prefill_s, read_measured
from cluster.simulation.gaps import Gaps
from cluster.simulation.node_stores import NodeStores
from cluster.simulation.sizes import parse_size, size_text
from cluster.simulation.workload import chunk_key

CHUNK = 16
TIMES = EngineTimes(prefill_overhead_s=0.01, prefill_token_s=0.001, prefill_pair_s=0.0, decode_step_s=0.1)


def keys(*blocks: int) -> list[ChunkKey]:
    return [chunk_key(block) for block in blocks]


class PoolUnderLoad(RuleBasedStateMachine):
    """Requests come to a pool and leave it in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.leases: list[Lease] = []
        self.there: set[ChunkKey] = set()

    @rule(start=st.integers(0, 3), length=st.integers(0, 6), more=st.integers(0, 4))
    def admit(self, start: int, length: int, more: int) -> None:
        prompt = keys(*range(start * 10, start * 10 + length))
        admitted = self.pool.admit(prompt, length, length + more)
        if admitted is not None:
            self.leases.append(admitted.lease)
            self.there -= set(admitted.evicted)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        self.there |= set(self.pool.computed(data.draw(st.sampled_from(self.leases))))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        self.pool.release(lease)

    @invariant()
    def what_was_reported_is_what_is_there(self) -> None:
        self.pool.check_integrity(self.leases)
        for start in range(4):
            chain = keys(*range(start * 10, start * 10 + 6))
            leading = 0
            while leading < len(chain) and chain[leading] in self.there:
                leading += 1
            assert self.pool.match(chain) == leading


TestPoolUnderLoad = PoolUnderLoad.TestCase
TestPoolUnderLoad.settings = settings(max_examples=60, deadline=None)


def test_the_end_of_a_prompt_leaves_before_its_beginning() -> None:
    pool = BlockPool(4)
    first = pool.admit(keys(1, 2, 3), 0, 3)
    assert first is not None
    pool.computed(first.lease)
    pool.release(first.lease)
    second = pool.admit(keys(9), 0, 2)
    assert second is not None
    assert second.evicted == keys(3)


def test_blocks_that_a_request_holds_are_not_evicted() -> None:
    pool = BlockPool(4)
    first = pool.admit(keys(1, 2, 3), 0, 3)
    assert first is not None
    assert pool.admit(keys(8, 9), 0, 2) is None
    pool.check_integrity([first.lease])


def engine(blocks: int = 1000, **times: Any) -> Engine:
    return Engine(TIMES.model_copy(update=times), blocks, CHUNK, Gaps())


def finish(engine: Engine, until: float = 1e9) -> dict[int, float]:
    """Request -> when its first token came."""
    first: dict[int, float] = {}
    while (due := engine.next_at()) is not None and due <= until:
        first |= {job.number: due for job in engine.advance(due).first_tokens}
    return first


def test_a_prefill_takes_overhead_tokens_and_pairs() -> None:
    times = TIMES.model_copy(update={"prefill_pair_s": 1e-5})
    assert prefill_s(times, 100, 50) == pytest.approx(100 * 0.001 + 100 * (50 + 50) * 1e-5)
    alone = engine(prefill_pair_s=1e-5)
    alone.submit(Job(1, [], 100, 1), 0.0)
    assert finish(alone) == {1: pytest.approx(0.01 + 0.1 + 100 * 50 * 1e-5)}


def test_a_stream_takes_a_step_for_each_further_token() -> None:
    alone = engine(decode_stream_s=0.01)
    alone.submit(Job(1, [], 100, 11), 0.0)
    first = finish(alone, until=0.2)[1]
    end = alone.next_at()
    assert end == pytest.approx(first + 10 * (0.1 + 0.01))


def test_streams_take_part_in_the_steps_of_a_long_prefill_and_make_them_longer() -> None:
    shared = engine(step_tokens=100, decode_stream_s=0.02)
    shared.submit(Job(1, [], 100, 1000), 0.0)
    finish(shared, until=0.5)
    shared.submit(Job(2, [], 1000, 1), 1.0)
    # Ten steps, of a hundred tokens each, and the stream's part in each of them.
    assert finish(shared, until=4.0)[2] == pytest.approx(1.0 + 0.01 + 10 * 0.1 + 10 * 0.02)


def test_short_prompts_are_computed_together() -> None:
    many = engine(step_tokens=1000)
    for number in range(1, 4):
        many.submit(Job(number, [], 100, 1), 0.0)
    first = finish(many)
    # The first was alone when it came; the others share an overhead.
    assert first[2] == first[3] == pytest.approx(first[1] + 0.01 + 0.2)


def test_a_prompt_that_is_cached_whole_computes_its_last_chunk() -> None:
    twice = engine()
    for number in (1, 2):
        twice.submit(Job(number, keys(1, 2, 3), 3 * CHUNK, 1), float(number))
        finish(twice)
    job = Job(3, keys(1, 2, 3), 3 * CHUNK, 1)
    twice.submit(job, 10.0)
    finish(twice)
    assert (job.cached, job.computed) == (2 * CHUNK, CHUNK)
    twice.check_integrity()


def stores(**tiers: Any) -> NodeStores:
    config = SimulationConfig(chunk_tokens=CHUNK, tiers=TiersConfig(**tiers))
    return NodeStores(config, ["a", "b"], lambda *_: None)


NBYTES = CHUNK * SimulationConfig().engine.kv_bytes_per_token


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(1, 8), st.booleans()), max_size=40
    ),
    st.sampled_from(("lru", "s3fifo", "cost")),
)
@settings(max_examples=60, deadline=None)
def test_no_tier_ever_has_more_than_it_has_room_for(
    moves: list[tuple[str, int, int, bool]], eviction: str
) -> None:
    held = stores(
        dram=5 * NBYTES,
        disk=7 * NBYTES,
        remote=9 * NBYTES,
        dram_eviction=eviction,
        disk_eviction=eviction,
        disk_admission="always",
    )
    for number, (node, start, count, save) in enumerate(moves):
        chunks = keys(*range(start * 3, start * 3 + count))
        if save:
            held.save(node, chunks, 0.001)
        else:
            held.load(node, chunks, float(number), 0.001)
        held.check_integrity()


def test_two_loads_from_one_source_share_its_bandwidth() -> None:
    fast = {"latency_s": 0.5, "bytes_per_s": NBYTES}
    held = stores(dram=100 * NBYTES, from_dram=fast)
    held.save("a", keys(1, 2), 100.0)
    assert held.load("a", keys(1, 2), 10.0, 100.0).ready_s == pytest.approx(12.5)
    assert held.load("a", keys(1), 10.0, 100.0).ready_s == pytest.approx(13.5)


def test_second_touch_writes_to_disk_what_comes_up_again() -> None:
    held = stores(dram=100 * NBYTES, disk=100 * NBYTES)
    held.save("a", keys(1, 2), 1.0)
    assert held.moved.written["disk"] == 0
    held.load("a", keys(1), 0.0, 1.0)
    assert held.moved.written["disk"] == NBYTES


def test_times_are_fitted_to_what_was_measured(tmp_path: Path) -> None:
    true = EngineTimes(prefill_overhead_s=0.02, prefill_token_s=1e-4, prefill_pair_s=1e-8)
    rows: list[dict[str, Any]] = []
    for tokens, cached in ((100, 0), (1000, 0), (8000, 0), (500, 4000), (4000, 8000)):
        seconds = true.prefill_overhead_s + prefill_s(true, tokens, cached)
        rows.append({"kind": "prefill", "tokens": tokens, "cached": cached, "seconds": seconds})
    rows += [{"kind": "decode", "streams": n, "seconds": 0.01 + 0.001 * n} for n in (1, 4, 16)]
    rows += [{"kind": "load", "tier": "disk", "bytes": n, "seconds": 0.005 + n / 1e9} for n in (10**6, 10**8)]
    path = tmp_path / "measured.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    engine_times, tiers = read_measured(path, EngineTimes(), TiersConfig())
    assert engine_times.prefill_overhead_s == pytest.approx(0.02)
    assert engine_times.prefill_token_s == pytest.approx(1e-4)
    assert engine_times.prefill_pair_s == pytest.approx(1e-8)
    assert (engine_times.decode_step_s, engine_times.decode_stream_s) == pytest.approx((0.01, 0.001))
    assert tiers.from_disk.bytes_per_s == pytest.approx(1e9)
    assert tiers.from_disk.latency_s == pytest.approx(0.005)
    assert tiers.from_dram == TiersConfig().from_dram


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"kind": "prefill", "tokens": 5}', "missing required field `seconds`"),
        ('{"kind": "prefill", "tokens": -5, "seconds": 1}', "negative"),
        ('{"kind": "boil", "seconds": 1}', "boil"),
        ("nonsense", "malformed"),
    ],
)
def test_a_wrong_measurement_is_named_by_its_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "measured.jsonl"
    path.write_text('{"kind": "decode", "streams": 1, "seconds": 0.1}\n' + line + "\n")
    with pytest.raises(MeasurementError) as caught:
        read_measured(path, EngineTimes(), TiersConfig())
    assert str(caught.value).startswith(f"{path}:2: ")
    assert says in str(caught.value)


def test_pauses_are_counted_within_two_percent() -> None:
    gaps = Gaps()
    for number in range(1, 1001):
        gaps.add(number / 1000, 2.0)
    assert gaps.mean == pytest.approx(0.5005)
    assert gaps.percentiles((0.5, 0.9, 0.99)) == pytest.approx([0.5, 0.9, 0.99], rel=0.02)
    assert Gaps().percentiles((0.5,)) == [0.0]


def test_a_minute_of_one_replica_counts_in_every_minute_that_it_is_in() -> None:
    at = np.arange(300, dtype=np.float64)
    replica = np.where(at < 60, 0, np.arange(300) % 2)
    found = balance(at, replica, np.ones(300), 2)
    assert found.p50 == pytest.approx(1.0)
    assert found.p99 > 1.9


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("64GiB", 64 * 2**30), ("1.5TB", 15 * 10**11), ("4096", 4096), ("0", 0), ("2 MiB", 2**21), ("7B", 7)],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 XB", "1e400", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="needed"):
        parse_size(text)


@given(st.integers(0, 2**60))
def test_a_size_is_written_as_it_is_read(nbytes: int) -> None:
    assert parse_size(size_text(nbytes)) == pytest.approx(nbytes, rel=0.06, abs=0)
