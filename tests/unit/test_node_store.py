"""A node's store: what engines save and load, what leaves memory, and what other things going wrong do to neither."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from cache_store.wire import ABSENT, DRAM
from tests.store_rig import NBYTES, header, key, payload, rigged, until


async def test_what_was_saved_is_found_and_loaded() -> None:
    async with rigged() as r:
        assert await r.save(1) == "stored"
        found = r.lookup(1, 2)
        assert (list(found.tiers), found.bytes_per_chunk, found.lease > 0) == ([DRAM, ABSENT], NBYTES, True)
        assert (await r.load(1))[:2] == ("loaded", DRAM)
        assert (await r.load(2)).outcome == "missing"
        assert r.published("dram") == {1}
        assert r.store.counters.loads == {"loaded": 1, "missing": 1, "corrupt": 0, "late": 0}
        assert r.store.counters.loaded_bytes["dram"] == NBYTES


async def test_a_payload_may_change_as_soon_as_it_is_saved() -> None:
    async with rigged() as r:
        slot = bytearray(payload(1))
        with memoryview(slot) as view:
            assert await r.store.save(header(1), view) == "stored"
        slot[:] = bytes(len(slot))
        assert (await r.load(1)).outcome == "loaded"


async def test_a_chunk_is_there_when_the_part_of_every_rank_is() -> None:
    async with rigged() as r:
        assert await r.save(1, 1, 2) == "stored"
        assert r.tiers(1, world_size=2) == [ABSENT]
        assert r.published("dram") == set()
        assert await r.save(1, 0, 2) == "stored"
        assert r.tiers(1, world_size=2) == [DRAM]
        assert r.lookup(1, world_size=2).bytes_per_chunk == 2 * NBYTES
        assert r.published("dram") == {1}
        for rank in range(2):
            assert (await r.load(1, rank)).outcome == "loaded"
        assert (await r.load(1, 2)).outcome == "missing"


async def test_chunks_of_another_world_size_are_not_there() -> None:
    async with rigged() as r:
        await r.save(1)
        assert r.tiers(1, world_size=2) == [ABSENT]
        for world_size in (0, -1, 65, 2**40):
            assert r.tiers(1, world_size=world_size) == [ABSENT]


async def test_saving_twice_keeps_one() -> None:
    async with rigged() as r:
        assert [await r.save(1), await r.save(1)] == ["stored", "present"]
        both = await asyncio.gather(r.save(2), r.save(2))
        assert sorted(both) == ["present", "stored"]
        assert r.store.stats().dram_in_use == 2 * NBYTES
        assert r.store.counters.saves == {"stored": 2, "present": 2, "dropped": 0, "refused": 0}


@pytest.mark.parametrize(
    "wrong",
    [
        {"nbytes": NBYTES - 1},
        {"nbytes": 0},
        {"rank": 1},
        {"rank": -1},
        {"world_size": 0},
        {"world_size": 1000},
        {"key": b"short"},
    ],
    ids=str,
)
async def test_a_header_that_does_not_fit_is_refused(wrong: dict[str, Any]) -> None:
    async with rigged() as r:
        made = msgspec.structs.replace(header(1), **wrong)
        assert await r.store.save(made, memoryview(payload(1))) == "refused"
        assert r.store.stats().dram_in_use == 0


async def test_a_part_that_is_unlike_the_others_of_its_chunk_is_refused() -> None:
    async with rigged() as r:
        await r.save(1, 0, 2)
        assert await r.save(1, 1, 3) == "refused"
        assert await r.save(1, 1, 2, identity=bytes([8]) * 32) == "refused"
        assert await r.save(1, 1, 2) == "stored"


async def test_saves_over_the_bound_are_dropped_and_counted_and_never_waited_for() -> None:
    async with rigged(chunks=1000, save_mib_in_flight=1) as r:
        r.space.putting.close()
        at_once = (1 << 20) // NBYTES
        saves = [asyncio.create_task(r.save(number)) for number in range(at_once + 3)]
        await until(lambda: sum(save.done() for save in saves) == 3)
        assert r.store.stats().saving == 1 << 20
        assert {save.result() for save in saves if save.done()} == {"dropped"}
        r.space.putting.open()
        assert (await asyncio.gather(*saves)).count("stored") == at_once
        assert r.store.counters.drops["in_flight"] == 3
        assert r.store.stats().saving == 0


async def test_a_full_object_space_drops_the_save() -> None:
    async with rigged() as r:
        r.space.full = True
        assert await r.save(1) == "dropped"
        assert r.store.counters.drops["failed"] == 1
        r.space.full = False
        assert await r.save(1) == "stored"


async def test_memory_stays_within_its_budget_and_what_was_not_used_leaves_first() -> None:
    async with rigged(chunks=3) as r:
        for number in range(3):
            await r.save(number)
        r.store.release(r.lookup(0).lease)
        for number in (3, 4):
            assert await r.save(number) == "stored"
            assert r.store.stats().dram_in_use <= 3 * NBYTES
        assert r.published("dram") == {0, 3, 4}
        assert r.store.counters.evicted["dram"] == 2
        assert r.space.bytes == 3 * NBYTES


async def test_the_end_of_a_prompt_leaves_before_its_beginning() -> None:
    async with rigged(chunks=3) as r:
        for number in range(3):
            await r.save(number)
        r.store.release(r.lookup(0, 1, 2).lease)
        await r.save(3)
        assert r.published("dram") == {0, 1, 3}


async def test_a_chunk_that_is_half_there_is_not_evicted_for_its_other_half() -> None:
    async with rigged(chunks=2) as r:
        await r.save(1, 0, 2)
        await r.save(2)
        assert await r.save(1, 1, 2) == "stored"
        assert r.published("dram") == {1}


async def test_leased_and_pinned_chunks_stay() -> None:
    async with rigged(chunks=2) as r:
        await r.save(1)
        await r.save(2)
        lease = r.lookup(1).lease
        assert r.store.pin([key(2), key(9)]) == 1
        assert await r.save(3) == "dropped"
        assert r.store.counters.drops["no_room"] == 1
        r.store.release(lease)
        assert await r.save(3) == "stored"
        assert r.published("dram") == {2, 3}
        assert r.store.unpin([key(2), key(9)]) == 1
        assert await r.save(4) == "stored"
        assert r.published("dram") == {3, 4}


async def test_only_the_leading_run_is_leased() -> None:
    async with rigged(chunks=3) as r:
        for number in (1, 2, 4):
            await r.save(number)
        r.lookup(1, 2, 3, 4)
        assert r.store.stats().leased == 2
        assert r.lookup(3, 4).lease == 0


async def test_a_lease_ends_by_the_clock() -> None:
    async with rigged(chunks=1) as r:
        await r.save(1)
        r.lookup(1, lease_s=10)
        assert await r.save(2) == "dropped"
        r.clock.now += 10
        r.store.expire()
        assert await r.save(2) == "stored"


async def test_a_tenant_over_its_quota_makes_room_among_its_own() -> None:
    async with rigged(chunks=1000, quota_mib={"small": 1}) as r:
        fits = (1 << 20) // NBYTES
        await r.save(5000, tenant="other")
        for number in range(fits + 2):
            assert await r.save(number, tenant="small") == "stored"
        assert r.store.stats().tenants == {"small": 1 << 20, "other": NBYTES}
        assert r.published("dram") == {5000, *range(2, fits + 2)}


async def test_a_tenant_whose_chunks_are_all_leased_saves_no_more() -> None:
    async with rigged(chunks=1000, default_quota_mib=1) as r:
        fits = (1 << 20) // NBYTES
        for number in range(fits):
            await r.save(number, tenant="small")
        r.lookup(*range(fits))
        assert await r.save(fits, tenant="small") == "dropped"
        assert await r.save(fits, tenant="other") == "stored"
        assert r.store.counters.drops["quota"] == 1


async def test_evicting_by_hand_leaves_pinned_chunks() -> None:
    async with rigged() as r:
        for number in range(4):
            await r.save(number)
        r.store.pin([key(0)])
        assert r.store.evict([key(0), key(1), key(9)]) == 1
        assert r.published("dram") == {0, 2, 3}
        assert r.store.evict(None) == 2
        assert r.published("dram") == {0}


async def test_a_pin_ends_with_its_chunk() -> None:
    async with rigged() as r:
        await r.save(1)
        r.store.pin([key(1)])
        r.store.corrupt(key(1), DRAM)
        assert r.store.stats().pinned == 0
        assert r.store.counters.corrupt["dram"] == 1
        assert r.tiers(1) == [ABSENT]


async def test_corruption_reported_of_nothing_and_nowhere_is_only_counted() -> None:
    async with rigged() as r:
        await r.save(1)
        for tier in (-1, ABSENT, 17):
            r.store.corrupt(key(2), tier)
        assert r.tiers(1) == [DRAM]
        assert r.store.counters.corrupt["absent"] == 3


async def test_what_nobody_used_for_its_time_is_dropped() -> None:
    async with rigged(ttl_s=100) as r:
        for number in range(4):
            await r.save(number)
        r.store.pin([key(1)])
        r.clock.now += 60
        r.lookup(0, lease_s=1)
        r.lookup(2, lease_s=600)
        r.clock.now += 60
        r.store.expire()
        assert r.published("dram") == {0, 1, 2}
        assert r.store.counters.expired == 1


async def test_a_load_that_is_cancelled_leaves_its_target_alone_from_then_on() -> None:
    async with rigged() as r:
        await r.save(1)
        target = bytearray(NBYTES)
        view = memoryview(target)
        load = asyncio.create_task(r.store.load_into(key(1), 0, view, 30.0))
        await asyncio.sleep(0)
        load.cancel()
        await asyncio.wait([load])
        view.release()
        before = bytes(target)
        await r.store.settle()
        assert target == before
        assert before in (bytes(NBYTES), payload(1))


async def test_a_save_that_is_cancelled_has_ended_with_its_payload() -> None:
    async with rigged() as r:
        r.space.putting.close()
        slot = bytearray(payload(1))
        view = memoryview(slot)
        save = asyncio.create_task(r.store.save(header(1), view))
        await until(lambda: r.space.putting.waiting == 1)
        save.cancel()
        await asyncio.sleep(0)
        assert not save.done()
        r.space.putting.open()
        await asyncio.wait([save])
        view.release()
        slot[:] = bytes(NBYTES)
        assert (await r.load(1)).outcome == "loaded"


async def test_a_target_that_is_too_short_is_a_miss() -> None:
    async with rigged() as r:
        await r.save(1)
        target = bytearray(NBYTES - 1)
        assert (await r.store.load_into(key(1), 0, memoryview(target), 1.0)).outcome == "missing"
        assert not any(target)


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan")])
async def test_a_load_without_time_is_late(limit_s: float) -> None:
    async with rigged() as r:
        r.space.putting.close()
        save = asyncio.create_task(r.save(1))
        await until(lambda: r.space.putting.waiting == 1)
        assert (await r.load(1, limit_s=limit_s)).outcome == "late"
        r.space.putting.open()
        await save


async def test_a_load_waits_for_the_save_that_is_under_way() -> None:
    async with rigged() as r:
        r.space.putting.close()
        save = asyncio.create_task(r.save(1))
        await until(lambda: r.space.putting.waiting == 1)
        load = asyncio.create_task(r.load(1))
        await asyncio.sleep(0)
        r.space.putting.open()
        assert (await load).outcome == "loaded"
        assert await save == "stored"


async def test_chunks_are_listed_with_what_people_want_to_know() -> None:
    async with rigged() as r:
        await r.save(1, tenant="t", cost_s=0.5)
        await r.save(2, 0, 2)
        r.store.pin([key(1)])
        r.clock.now += 5
        first, second = sorted(r.store.ls(10), key=lambda info: info.key)
        assert (first.key, first.tiers, first.nbytes) == (key(1).hex(), ("dram",), NBYTES)
        assert (first.tenant, first.cost_s, first.idle_s, first.pinned) == ("t", 0.5, 5.0, True)
        assert (second.tiers, second.world_size, second.pinned) == ((), 2, False)
        assert len(r.store.ls(1)) == 1
        assert r.store.ls(0) == []
        assert r.store.tiers_of([key(1), key(2), key(3)]) == [("dram",), (), ()]


async def test_statistics_travel() -> None:
    async with rigged() as r:
        await r.save(1)
        stats = r.store.stats()
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=type(stats)) == stats
        assert (stats.node, stats.tiers["dram"].chunks, stats.tiers["dram"].capacity) == (
            "here",
            1,
            8 * NBYTES,
        )
