"""What a plan says of where the cluster has a prompt's chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.events import ChunkKey, Tier
from cache_store.wire import Source
from router.index import Match, PrefixIndex
from router.loadable import Loadable
from router.plan import MAX_SOURCES, loadable, make_plan
from workers.messages import Plan, pack_plan, unpack_plan

KEYS = [ChunkKey(bytes([number * 7 % 256]) * 32) for number in range(12)]
NODES = {"cache-a": "a", "cache-b": "b", "cache-c": "c"}
TIERS: tuple[Tier, ...] = ("dram", "disk", "remote")

held = st.dictionaries(
    st.tuples(st.sampled_from(sorted(NODES)), st.sampled_from(TIERS)),
    st.sets(st.integers(0, len(KEYS) - 1)),
)


def match_of(chunks: dict[tuple[str, Tier], set[int]]) -> Match:
    index = PrefixIndex()
    for (holder, tier), numbers in chunks.items():
        index.apply(holder, tier, [KEYS[number] for number in numbers])
    return index.match(KEYS)


def plan_of(match: Match, start: int, tenant: str = "") -> Plan:
    return make_plan(match, start, loadable(match, start, "cache-a"), "cache-a", NODES, tenant)


def origin(chunks: dict[tuple[str, Tier], set[int]], node: str, number: int) -> str:
    """Where the node gets the chunk from, said slowly."""
    if number in chunks.get((node, "dram"), ()):
        return "dram"
    if any(number in chunks.get((peer, "dram"), ()) for peer in NODES):
        return "peer"
    if number in chunks.get((node, "disk"), ()):
        return "disk"
    if any(number in chunks.get((peer, "remote"), ()) for peer in NODES):
        return "remote"
    return ""


@given(held, st.integers(0, len(KEYS)))
def test_what_can_be_loaded_is_the_unbroken_run_by_its_nearest_place(
    chunks: dict[tuple[str, Tier], set[int]], start: int
) -> None:
    expected = dict.fromkeys(Loadable._fields, 0)
    for number in range(start, len(KEYS)):
        place = origin(chunks, "cache-a", number)
        if not place:
            break
        expected[place] += 1
    assert loadable(match_of(chunks), start, "cache-a")._asdict() == expected


@given(held, st.integers(0, len(KEYS)))
def test_sources_name_each_chunk_of_the_run_that_only_peers_have_in_memory_once(
    chunks: dict[tuple[str, Tier], set[int]], start: int
) -> None:
    match = match_of(chunks)
    plan = plan_of(match, start, "tenant")
    named = [
        (source.node, number)
        for source in plan.sources
        for number in range(source.first, source.first + source.count)
    ]
    end = start + loadable(match, start, "cache-a").total
    wanted = [number for number in range(start, end) if origin(chunks, "cache-a", number) == "peer"]
    assert sorted(number for _, number in named) == wanted
    assert all(number in chunks[f"cache-{node}", "dram"] for node, number in named)


@given(held)
def test_saving_is_skipped_for_the_leading_chunks_that_any_tier_keeps(
    chunks: dict[tuple[str, Tier], set[int]],
) -> None:
    known = set().union(*chunks.values()) if chunks else set()
    expected = next((number for number in range(len(KEYS)) if number not in known), len(KEYS))
    assert plan_of(match_of(chunks), 0, "").skip_save == expected


def test_a_node_without_a_cache_loads_nothing() -> None:
    assert loadable(match_of({("cache-a", "dram"): {0, 1}}), 0, "") == Loadable()


def test_a_peer_that_is_not_known_any_more_is_no_source() -> None:
    match = match_of({("cache-a", "dram"): set(), ("cache-gone", "dram"): {0, 1}})
    assert plan_of(match, 0, "").sources == ()


def test_a_plan_is_bounded_however_scattered_the_prefix_is() -> None:
    keys = [ChunkKey(number.to_bytes(32, "little")) for number in range(4 * MAX_SOURCES)]
    index = PrefixIndex()
    index.apply("cache-b", "dram", keys[::2])
    index.apply("cache-c", "dram", keys[1::2])
    plan = plan_of(index.match(keys), 0, "")
    assert len(plan.sources) == MAX_SOURCES


def test_what_is_slowest_to_load_is_left_out_first() -> None:
    assert Loadable(3, 2, 4, 1).within(6) == Loadable(3, 2, 1, 0)
    assert Loadable(3, 2, 4, 1).within(-1) == Loadable()


def test_a_plan_crosses_in_a_header() -> None:
    plan = Plan("tenant", (Source("node", 2, 3),), 4)
    assert unpack_plan(pack_plan(plan)) == plan


@pytest.mark.parametrize("wrong", ["", "!", "kA=="])
def test_what_is_no_plan_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="x-manta-plan"):
        unpack_plan(wrong)
