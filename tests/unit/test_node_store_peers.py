"""Stores of several nodes: what one has in memory, another gets by the router's plan."""

from __future__ import annotations

import asyncio

import pytest

from cache_store.node_store import QUEUEING_S
from cache_store.object_space import ObjectGone
from cache_store.peers import Lent
from cache_store.wire import ABSENT, DISK, DRAM, PEER, Source
from tests.store_rig import NBYTES, MemoryFiles, OtherNodes, Rig, flipped, key, rigged

THERE = (Source("there", 0, 3),)


async def pair(others: OtherNodes, there: Rig, *numbers: int, world_size: int = 1) -> None:
    others.stores["there"] = there.store
    for number in numbers:
        for rank in range(world_size):
            assert await there.save(number, rank, world_size) == "stored"


async def test_chunks_that_the_plan_names_come_from_the_other_node() -> None:
    others = OtherNodes()
    async with rigged(node="there") as there, rigged(others=others, chunks=12) as here:
        await pair(others, there, 1, 2, 3, world_size=2)
        found = here.lookup(1, 2, 3, world_size=2, sources=THERE)
        assert (list(found.tiers), found.lease > 0) == ([PEER] * 3, True)
        for number in (1, 2, 3):
            for rank in range(2):
                assert (await here.load(number, rank))[:2] == ("loaded", PEER)
                assert (await here.load(number, rank))[:2] == ("loaded", DRAM)
        assert others.fetches == [("there", [key(1), key(2), key(3)])]
        assert here.published("dram") == {1, 2, 3}
        assert here.store.counters.moved["peer"] == there.store.counters.lent == 6


async def test_this_node_is_asked_first() -> None:
    others = OtherNodes()
    files = MemoryFiles()
    async with rigged(node="there") as there, rigged(others=others, disk=files) as here:
        await pair(others, there, 1, 2, 3)
        for number in (1, 2):
            await here.save(number)
            await here.store.settle()
        here.store.evict([key(2)], ["dram"])
        assert list(here.lookup(1, 2, 3, sources=THERE).tiers) == [DRAM, DISK, PEER]
        await here.store.settle()
        assert others.fetches == [("there", [key(3)])]


async def test_a_plan_that_names_this_node_or_positions_that_are_not_there_is_no_source() -> None:
    others = OtherNodes()
    async with rigged(others=others) as here:
        sources = (Source("here", 0, 3), Source("there", 3, 10**9), Source("there", -5, 5))
        assert list(here.lookup(1, 2, sources=sources).tiers) == [ABSENT, ABSENT]
        await here.store.settle()
        assert not others.fetches


async def test_what_the_other_node_lacks_is_a_miss() -> None:
    others = OtherNodes()
    async with rigged(node="there") as there, rigged(others=others) as here:
        await pair(others, there, 1)
        here.lookup(1, 2, sources=THERE)
        assert (await here.load(1)).outcome == "loaded"
        assert (await here.load(2)).outcome == "missing"


@pytest.mark.parametrize("error", [RuntimeError("gone"), TimeoutError(), KeyError("there")], ids=str)
async def test_a_node_that_fails_is_a_miss_and_counted(error: Exception) -> None:
    others = OtherNodes()
    async with rigged(others=others) as here:
        others.error = error
        here.lookup(1, 2, sources=THERE)
        assert (await here.load(1)).outcome == "missing"
        await here.store.settle()
        assert here.store.counters.peer_failures == 1
        assert here.store.counters.moves_failed["missing"] == 2


async def test_a_node_that_hangs_is_given_up_at_the_time_limit() -> None:
    others = OtherNodes()
    async with rigged(others=others, dram={"pull_timeout_s": 0.05}) as here:
        others.gate.clear()
        here.lookup(1, sources=THERE)
        assert (await here.load(1)).outcome == "missing"
        assert here.store.counters.peer_failures == 1


async def test_a_load_does_not_wait_longer_than_its_own_limit() -> None:
    others = OtherNodes()
    async with rigged(others=others) as here:
        others.gate.clear()
        here.lookup(1, sources=THERE)
        await asyncio.sleep(0)
        assert (await here.load(1, limit_s=0.02)).outcome == "late"
        others.error = RuntimeError("gone")
        others.gate.set()


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(ObjectGone("owner died"), "missing"), (TimeoutError(), "late"), (MemoryError(), "missing")],
)
async def test_a_pull_that_fails_is_a_miss_and_holds_nothing(error: Exception, outcome: str) -> None:
    others = OtherNodes()
    async with rigged(node="there") as there, rigged(others=others) as here:
        await pair(others, there, 1)
        here.space.pull_error = error
        here.lookup(1, sources=THERE)
        assert (await here.load(1)).outcome == outcome
        await here.store.settle()
        assert here.store.stats().dram_in_use == 0


async def test_what_is_not_what_was_asked_for_is_never_taken_in() -> None:
    class Liars(OtherNodes):
        async def fetch(self, node, keys, limit_s):  # type: ignore[no-untyped-def]
            lent = await super().fetch(node, keys, limit_s)
            first, second, third = (lent[name] for name in sorted(lent))
            return {
                (key(1), 0): Lent(flipped(first.header), first.ref),
                (key(2), 0): Lent(third.header, third.ref),
                (key(3), 0): Lent(third.header, second.ref),
            }

    others = Liars()
    async with rigged(node="there") as there, rigged(others=others) as here:
        await pair(others, there, 1, 2, 3)
        here.lookup(1, 2, 3, sources=THERE)
        await here.store.settle()
        assert {(await here.load(number)).outcome for number in (1, 2, 3)} == {"missing"}
        assert here.store.counters.corrupt["peer"] == 3
        assert here.published("dram") == set()


async def test_a_pulled_copy_counts_until_it_is_freed() -> None:
    others = OtherNodes()
    async with rigged(node="there") as there, rigged(others=others, chunks=1) as here:
        await pair(others, there, 1)
        here.lookup(1, sources=THERE)
        # Room for the chunk, and none for the copy that comes on the way to it.
        assert (await here.load(1)).outcome == "missing"
        assert here.store.counters.moves_failed["no_room"] == 1


async def test_what_was_lent_stays_for_its_time() -> None:
    async with rigged(chunks=1) as r:
        await r.save(1)
        assert set(r.store.lend([key(1), key(2)], 10)) == {(key(1), 0)}
        assert await r.save(2) == "dropped"
        r.clock.now += 10
        r.store.expire()
        assert await r.save(2) == "stored"


async def test_chunks_that_are_half_there_are_not_lent() -> None:
    async with rigged() as r:
        await r.save(1, 0, 2)
        assert r.store.lend([key(1)], 10) == {}


async def test_a_prefetch_brings_the_run_and_keeps_it_until_an_engine_asks_for_it() -> None:
    others = OtherNodes()
    async with rigged(node="there") as there, rigged(others=others, chunks=8) as here:
        await pair(others, there, 1, 2)
        assert here.store.prefetch([key(1), key(2)], 1, THERE[:1]) == 2
        await here.store.settle()
        assert here.published("dram") == {1, 2}
        assert here.store.stats().dram_in_use == 2 * NBYTES
        assert here.store.stats().leased == 2
        lease = here.lookup(1, 2, 3).lease
        assert (here.store.stats().leases, here.store.stats().leased) == (1, 2)
        here.store.release(lease)
        assert here.store.stats().leases == 0


async def test_a_prefetch_for_which_no_engine_asks_ends_soon_after_its_chunks_can_have_come() -> None:
    async with rigged(dram={"pull_timeout_s": 2.0}) as r:
        await r.save(1)
        assert r.store.prefetch([key(1)], 1) == 1
        r.clock.now += 2.0
        r.store.expire()
        assert r.store.stats().leased == 1
        r.clock.now += QUEUEING_S
        r.store.expire()
        assert r.store.stats().leases == 0


async def test_prefetches_leave_room_for_saves() -> None:
    """Three prompts are on their way here, more than memory has room for; what the engines compute is kept."""
    others, plan = OtherNodes(), (Source("there", 0, 4),)
    async with rigged(node="there", chunks=12) as there, rigged(others=others, chunks=8) as here:
        await pair(others, there, *range(12))
        for first in (0, 4, 8):
            here.store.prefetch([key(number) for number in range(first, first + 4)], 1, plan)
        await here.store.settle()
        assert here.published("dram") == {0, 1}
        for number in range(20, 26):
            assert await here.save(number) == "stored"
        assert here.published("dram") == {0, 1, *range(20, 26)}
        assert here.store.counters.saves["dropped"] == 0
        assert (here.store.counters.prefetched, here.store.counters.prefetches_refused) == (12, 10)
        # Of these it is known at once how large they are.
        assert here.store.prefetch([key(number) for number in (20, 21, 22)], 1) == 0
        assert (here.store.counters.prefetched, here.store.counters.prefetches_refused) == (12, 13)
