"""Loading against computing: by measured rates, and in favour of trying where nothing was measured."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.load_cost import LATENCY_S, SECONDS_PER_BYTE, BandwidthMeter, chunks_worth_loading
from cache_store.wire import ABSENT, DISK, DRAM, PEER, REMOTE, TIER_NAMES

MIB = 2**20
CHUNK_BYTES = 6 * MIB
CHUNK_TOKENS = 256
UNKNOWN = (0.0,) * len(TIER_NAMES)
NO_LATENCY = (0.0,) * len(TIER_NAMES)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def rates(**mib_per_s: float) -> list[float]:
    """Seconds per byte by tier code; 0 for tiers that are not named."""
    return [1 / (mib_per_s[name] * MIB) if name in mib_per_s else 0.0 for name in TIER_NAMES]


def worth(tiers: bytes, seconds_per_byte: list[float], prefill_rate: float, **others: Any) -> int:
    return chunks_worth_loading(tiers, CHUNK_BYTES, CHUNK_TOKENS, seconds_per_byte, prefill_rate, **others)


def test_memory_is_loaded_and_not_computed_again() -> None:
    assert worth(bytes([DRAM] * 6), rates(dram=4_000), prefill_rate=400) == 6


def test_a_slow_tier_loses_to_computing_and_is_not_loaded() -> None:
    # 6 MiB at 5 MiB/s take 1.2 s; 256 tokens at 400 a second take 0.64 s.
    assert worth(bytes([DISK] * 6), rates(disk=5), prefill_rate=400) == 0
    assert worth(bytes([DISK] * 6), rates(disk=20), prefill_rate=400) == 6


def test_a_short_prefix_is_computed_where_a_long_one_is_loaded() -> None:
    # A chunk saves 0.02 s; the tier's fixed cost is eaten up by the third.
    latency_s = [0.0, 0.0, 0.0, 0.0, 0.05]
    tiers = bytes([REMOTE] * 8)
    fast = 256 / (0.02 + CHUNK_BYTES / (1_000 * MIB))
    for count in range(8):
        expected = count if count >= 3 else 0
        assert worth(tiers[:count], rates(remote=1_000), fast, latency_s=latency_s) == expected


def test_a_slow_tier_with_a_short_prefix_is_computed_by_default_latencies() -> None:
    gpu = 50_000.0
    assert worth(bytes([REMOTE] * 2), rates(remote=200), gpu) == 0
    assert worth(bytes([DRAM] * 2), rates(dram=20_000), gpu) == 2


def test_the_run_is_cut_where_the_rest_is_slower_than_computing() -> None:
    tiers = bytes([DRAM] * 4 + [DISK] * 10)
    assert worth(tiers, rates(dram=4_000, disk=5), prefill_rate=400) == 4


def test_slow_chunks_are_loaded_for_the_sake_of_fast_ones_behind_them() -> None:
    slow = rates(dram=4_000, disk=8)
    assert worth(bytes([DISK]), slow, prefill_rate=400) == 0
    assert worth(bytes([DISK, DRAM, DRAM]), slow, prefill_rate=400) == 3


def test_nothing_is_loaded_behind_a_chunk_that_is_not_there() -> None:
    assert worth(bytes([DRAM, DRAM, ABSENT, DRAM]), rates(dram=4_000), prefill_rate=400) == 2
    assert worth(bytes([ABSENT, DRAM]), rates(dram=4_000), prefill_rate=400) == 0
    assert worth(b"", rates(dram=4_000), prefill_rate=400) == 0
    assert worth(bytes([DRAM, 200, DRAM]), rates(dram=4_000), prefill_rate=400) == 1


def test_a_tier_that_was_never_measured_is_tried() -> None:
    for tier in (DRAM, PEER, DISK, REMOTE):
        assert worth(bytes([tier] * 6), list(UNKNOWN), prefill_rate=400) == 6


def test_an_engine_that_was_never_measured_loads_what_is_there() -> None:
    assert worth(bytes([REMOTE, DISK, ABSENT]), rates(disk=0.001, remote=0.001), prefill_rate=0.0) == 2


def test_what_the_engine_has_of_the_first_chunk_is_no_gain() -> None:
    # 0.4 s to load; 0.64 s to compute all of it, 0.32 s to compute half.
    disk = rates(disk=15)
    assert worth(bytes([DISK]), disk, prefill_rate=400) == 1
    assert worth(bytes([DISK]), disk, prefill_rate=400, local_tokens=128) == 0
    assert worth(bytes([DISK] * 2), disk, prefill_rate=400, local_tokens=128) == 2


@given(
    tiers=st.lists(st.integers(DRAM, REMOTE), min_size=1, max_size=12).map(bytes),
    nbytes=st.integers(1, 64 * MIB),
    seconds_per_byte=st.lists(st.floats(1e-11, 1e-5), min_size=5, max_size=5),
    prefill_rate=st.floats(10, 1e5),
    local_tokens=st.integers(0, CHUNK_TOKENS - 1),
)
def test_no_other_split_is_predicted_to_be_faster(
    tiers: bytes, nbytes: int, seconds_per_byte: list[float], prefill_rate: float, local_tokens: int
) -> None:
    def seconds(loaded: int) -> float:
        """Until the KV of all chunks is there."""
        run = tiers[:loaded]
        load = sum(nbytes * seconds_per_byte[tier] for tier in run) + sum(
            LATENCY_S[tier] for tier in set(run)
        )
        computed = (len(tiers) - loaded) * CHUNK_TOKENS - (local_tokens if not loaded else 0)
        return load + computed / prefill_rate

    best = chunks_worth_loading(
        tiers, nbytes, CHUNK_TOKENS, seconds_per_byte, prefill_rate, local_tokens=local_tokens
    )
    assert seconds(best) <= min(seconds(loaded) for loaded in range(len(tiers) + 1)) * (1 + 1e-9)


def test_defaults_are_there_for_every_tier_and_faster_ones_cost_less() -> None:
    assert len(SECONDS_PER_BYTE) == len(LATENCY_S) == len(TIER_NAMES)
    for costs in (SECONDS_PER_BYTE, LATENCY_S):
        assert 0 < costs[DRAM] <= costs[PEER] <= costs[DISK] <= costs[REMOTE]


def test_a_meter_knows_nothing_of_what_it_did_not_measure() -> None:
    meter = BandwidthMeter(Clock())
    assert meter.seconds_per_byte() == UNKNOWN


def test_a_meter_measures_each_tier_by_itself() -> None:
    clock = Clock()
    meter = BandwidthMeter(clock)
    for tier, seconds in ((DRAM, 0.001), (DISK, 0.01), (REMOTE, 0.1)):
        clock.now += seconds
        meter.record(tier, MIB, seconds)
    assert meter.seconds_per_byte() == pytest.approx((0.0, 0.001 / MIB, 0.0, 0.01 / MIB, 0.1 / MIB))


def test_a_meter_follows_a_tier_that_changes() -> None:
    clock = Clock()
    meter = BandwidthMeter(clock)
    for seconds in [0.01] * 50 + [0.1] * 50:
        clock.now += seconds
        meter.record(DISK, MIB, seconds)
    assert meter.seconds_per_byte()[DISK] == pytest.approx(0.1 / MIB, rel=0.02)


def test_one_load_among_many_does_not_decide() -> None:
    clock = Clock()
    meter = BandwidthMeter(clock)
    for seconds in [0.01] * 50 + [0.1]:
        clock.now += seconds
        meter.record(DISK, MIB, seconds)
    assert 0.01 / MIB < meter.seconds_per_byte()[DISK] < 0.03 / MIB


def test_time_in_which_several_loads_ran_counts_once() -> None:
    clock = Clock()
    meter = BandwidthMeter(clock)
    for _ in range(100):
        clock.now += 0.04
        for _ in range(4):
            meter.record(DISK, MIB, 0.04)
    assert meter.seconds_per_byte()[DISK] == pytest.approx(0.01 / MIB, rel=0.2)


def test_time_without_loads_does_not_count() -> None:
    clock = Clock()
    meter = BandwidthMeter(clock)
    for _ in range(20):
        clock.now += 5.0
        meter.record(DISK, MIB, 0.01)
    assert meter.seconds_per_byte()[DISK] == pytest.approx(0.01 / MIB)


def test_a_load_that_brought_nothing_counts_as_time() -> None:
    clock = Clock()
    meter = BandwidthMeter(clock)
    clock.now += 1.0
    meter.record(DISK, 0, 1.0)
    assert meter.seconds_per_byte() == UNKNOWN
    clock.now += 1.0
    meter.record(DISK, MIB, 1.0)
    assert meter.seconds_per_byte()[DISK] > 1.0 / MIB


def test_a_rate_that_nothing_confirms_is_forgotten_so_that_a_slow_tier_is_tried_again() -> None:
    clock = Clock()
    meter = BandwidthMeter(clock, forget_s=30.0)
    clock.now += 10.0
    meter.record(DISK, MIB, 10.0)
    tiers = bytes([DISK] * 6)
    assert worth(tiers, list(meter.seconds_per_byte()), prefill_rate=400) == 0
    clock.now += 31.0
    assert meter.seconds_per_byte() == UNKNOWN
    assert worth(tiers, list(meter.seconds_per_byte()), prefill_rate=400) == 6
    clock.now += 0.01
    meter.record(DISK, MIB, 0.01)
    assert meter.seconds_per_byte()[DISK] == pytest.approx(0.01 / MIB)
