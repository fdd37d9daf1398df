"""Numbers of all nodes together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache_store.store_stats import StoreCounters, StoreStats, TierStats
from router.cache_answers import totals

SIZES = st.integers(0, 1 << 40)
TIERS = st.builds(TierStats, chunks=SIZES, bytes=SIZES, capacity=SIZES, healthy=st.booleans())


def node(name: str, counters: StoreCounters | None = None, **tiers: TierStats) -> StoreStats:
    return StoreStats(
        node=name, tiers=tiers, dram_in_use=0, dram_leaving=0, saving=0, leases=0, leased=0, pinned=0, flights=0,
        tenants={}, seconds_per_byte=(0, 0, 0, 0, 0), counters=counters or StoreCounters(),
    )  # fmt: skip


@given(st.lists(TIERS, max_size=5))
def test_nodes_add_up_tier_by_tier(told: list[TierStats]) -> None:
    found = totals([node(str(number), dram=tier) for number, tier in enumerate(told)])
    if not told:
        assert found.tiers == {}
        return
    dram = found.tiers["dram"]
    assert dram.chunks == sum(tier.chunks for tier in told)
    assert dram.bytes == sum(tier.bytes for tier in told)
    assert dram.healthy == all(tier.healthy for tier in told)
    # No limit at one node is none for all.
    assert dram.capacity == (0 if any(tier.capacity == 0 for tier in told) else sum(t.capacity for t in told))


def test_the_remote_store_is_one_however_many_nodes_see_it() -> None:
    nodes = [
        node("a", remote=TierStats(7, 700, 0)),
        node("b", remote=TierStats(9, 900, 0, healthy=False)),
        node("c", dram=TierStats(1, 1, 1)),
    ]
    assert totals(nodes).tiers["remote"] == TierStats(9, 900, 0, healthy=False)
    assert totals(nodes).tiers["dram"] == TierStats(1, 1, 1)


def test_counters_add_up_name_by_name() -> None:
    one, other = StoreCounters(lookups=2, expired=1), StoreCounters(lookups=3)
    one.saves["stored"], other.saves["stored"], other.saves["dropped"] = 5, 6, 1
    found = totals([node("a", one), node("b", other)]).counters
    assert (found.lookups, found.expired) == (5, 1)
    assert found.saves == {"stored": 11, "present": 0, "dropped": 1, "refused": 0}
    assert totals([]).counters == StoreCounters()
