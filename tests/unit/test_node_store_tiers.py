"""A node's store and its slower tiers: what is written, read back, and what a bad one does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from cache_store.disk import DiskTier
from cache_store.shelf_writer import HEAD_BYTES
from cache_store.wire import ABSENT, DISK, DRAM, REMOTE
from tests.store_rig import NBYTES, MemoryFiles, key, payload, rigged, until


async def test_a_chunk_is_written_when_it_comes_up_again() -> None:
    files = MemoryFiles()
    async with rigged(disk=files, disk_config={"admission": "second_touch"}) as r:
        for number in (1, 2, 3):
            await r.save(number)
        await r.store.settle()
        assert r.published("disk") == set()
        r.lookup(1)
        await r.save(2)
        await r.store.settle()
        assert r.published("disk") == {1, 2}
        assert {number for number, _ in files.parts} == {key(1), key(2)}


async def test_the_ranks_of_one_chunk_are_one_touch_and_are_written_together() -> None:
    files = MemoryFiles()
    async with rigged(disk=files, disk_config={"admission": "second_touch"}) as r:
        for _ in range(2):
            await r.store.settle()
            assert not files.parts
            for rank in range(2):
                await r.save(1, rank, 2)
        await r.store.settle()
        assert set(files.parts) == {(key(1), 0), (key(1), 1)}
        assert r.published("disk") == {1}


async def test_what_left_memory_comes_back_from_disk() -> None:
    async with rigged(disk=MemoryFiles(), chunks=2) as r:
        for number in range(4):
            await r.save(number)
            await r.store.settle()
        assert r.tiers(0, 1, 2, 3) == [DISK, DISK, DRAM, DRAM]
        await r.store.settle()
        assert (await r.load(0))[:2] == ("loaded", DISK)
        assert (await r.load(0))[:2] == ("loaded", DRAM)
        assert r.store.counters.loaded_bytes["disk"] == NBYTES


async def test_a_look_up_moves_its_run_to_memory_ahead_of_the_loads() -> None:
    async with rigged(disk=MemoryFiles()) as r:
        for rank in range(2):
            await r.save(1, rank, 2)
        await r.store.settle()
        r.store.evict([key(1)], ["dram"])
        found = r.lookup(1, world_size=2)
        assert list(found.tiers) == [DISK]
        await r.store.settle()
        assert r.published("dram") == {1}
        assert r.store.counters.moved["disk"] == 2
        for rank in range(2):
            assert (await r.load(1, rank))[:2] == ("loaded", DISK)
            assert (await r.load(1, rank))[:2] == ("loaded", DRAM)


async def test_nothing_is_moved_for_a_lease_that_has_ended() -> None:
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        await r.save(1)
        await r.store.settle()
        r.store.evict([key(1)], ["dram"])
        assert r.tiers(1) == [DISK]
        await r.store.settle()
        assert files.reads == 0
        assert (await r.load(1))[:2] == ("loaded", DISK)


async def test_many_loads_of_one_chunk_are_one_read() -> None:
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        await r.save(1)
        await r.store.settle()
        r.store.evict([key(1)], ["dram"])
        files.reading.close()
        loads = [asyncio.create_task(r.load(1)) for _ in range(6)]
        await until(lambda: files.reading.waiting == 1)
        files.reading.open()
        assert {result[:2] for result in await asyncio.gather(*loads)} == {("loaded", DISK)}
        assert files.reads == 1


async def test_a_chunk_for_which_there_is_no_room_is_loaded_past_memory() -> None:
    async with rigged(disk=MemoryFiles(), chunks=1) as r:
        for number in (1, 2):
            await r.save(number)
            await r.store.settle()
        r.lookup(1, 2)
        await r.store.settle()
        assert [(await r.load(number))[:2] for number in (1, 2)] == [("loaded", DISK), ("loaded", DRAM)]
        assert r.published("dram") == {2}
        assert r.store.stats().dram_in_use == NBYTES


async def test_a_prompt_longer_than_memory_is_loaded_whole() -> None:
    async with rigged(disk=MemoryFiles(), chunks=3) as r:
        for number in range(9):
            await r.save(number)
            await r.store.settle()
        lease = r.lookup(*range(9)).lease
        results = await asyncio.gather(*(r.load(number) for number in range(9)))
        assert {result.outcome for result in results} == {"loaded"}
        r.store.release(lease)


async def test_a_disk_that_hangs_makes_loads_late_and_nothing_else() -> None:
    files = MemoryFiles()
    async with rigged(disk=files, disk_config={"timeout_s": 60.0}) as r:
        for number in (1, 2):
            await r.save(number)
            await r.store.settle()
        r.store.evict([key(1)], ["dram"])
        files.reading.close()
        assert (await r.load(1, limit_s=0.05)).outcome == "late"
        assert (await r.load(2)).outcome == "loaded"
        assert await r.save(3) == "stored"


async def test_a_read_over_the_tier_s_time_limit_is_given_up() -> None:
    files = MemoryFiles()
    async with rigged(disk=files, disk_config={"timeout_s": 0.05}) as r:
        await r.save(1)
        await r.store.settle()
        r.store.evict([key(1)], ["dram"])
        files.reading.close()
        assert (await r.load(1)).outcome == "late"
        assert r.store.counters.moves_failed["late"] == 1
        assert r.store.stats().dram_in_use == 0


async def test_a_tier_that_is_off_has_nothing_and_is_tried_until_it_works() -> None:
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        await r.save(1)
        await r.store.settle()
        r.store.evict([key(1)], ["dram"])
        files.readable = files.writable = False
        assert r.tiers(1) == [ABSENT]
        assert (await r.load(1)).outcome == "missing"
        assert await r.save(2) == "stored"
        await r.store.settle()
        assert r.store.counters.writes_dropped["disk"] == 1
        assert not r.store.stats().tiers["disk"].healthy
        r.store.expire()
        await r.store.settle()
        assert files.probes == 1
        files.readable = files.writable = True
        assert r.tiers(1) == [DISK]


async def test_what_is_corrupt_on_disk_is_dropped_there_and_counted() -> None:
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        for rank in range(2):
            await r.save(1, rank, 2)
        await r.store.settle()
        r.store.evict([key(1)], ["dram"])
        made, data = files.parts[key(1), 1]
        files.parts[key(1), 1] = made, bytes([data[0] ^ 1]) + data[1:]
        assert (await r.load(1, 1)).outcome == "corrupt"
        await r.store.settle()
        assert r.tiers(1, world_size=2) == [ABSENT]
        assert r.published("disk") == set()
        assert not files.parts
        assert r.store.counters.corrupt["disk"] == 1


async def test_a_file_that_is_gone_is_a_miss_and_forgotten() -> None:
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        await r.save(1)
        await r.store.settle()
        r.store.evict([key(1)], ["dram"])
        assert r.tiers(1) == [DISK]
        files.parts.clear()
        assert (await r.load(1)).outcome == "missing"
        assert r.tiers(1) == [ABSENT]


async def test_corruption_that_an_engine_reports_drops_the_chunk_there_and_from_memory() -> None:
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        for number in (1, 2):
            await r.save(number)
            await r.store.settle()
        r.store.corrupt(key(1), DRAM)
        r.store.corrupt(key(2), DISK)
        await r.store.settle()
        assert r.tiers(1, 2) == [DISK, ABSENT]
        assert set(files.parts) == {(key(1), 0)}


async def test_a_chunk_evicted_while_it_is_written_leaves_its_bytes_to_the_writer_and_no_file() -> None:
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        files.writing.close()
        await r.save(1)
        await until(lambda: files.writing.waiting == 1)
        assert r.store.evict([key(1)]) == 1
        assert r.tiers(1) == [ABSENT]
        assert (r.store.stats().dram_leaving, r.store.stats().dram_in_use) == (NBYTES, NBYTES)
        files.writing.open()
        await r.store.settle()
        assert not files.parts
        assert (r.published("disk"), r.store.stats().dram_in_use) == (set(), 0)


async def test_a_chunk_evicted_while_it_is_read_is_given_out_and_does_not_come_back() -> None:
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        await r.save(1)
        await r.store.settle()
        r.store.evict([key(1)], ["dram"])
        files.reading.close()
        load = asyncio.create_task(r.load(1))
        await until(lambda: files.reading.waiting == 1)
        files.deleting.close()
        r.store.evict([key(1)])
        files.reading.open()
        assert (await load)[:2] == ("loaded", DISK)
        assert r.tiers(1) == [ABSENT]
        assert r.store.stats().dram_in_use == 0


async def test_a_chunk_that_is_saved_while_its_old_files_are_deleted_is_written_after_that() -> None:
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        await r.save(1)
        await r.store.settle()
        files.deleting.close()
        r.store.evict([key(1)])
        await until(lambda: files.deleting.waiting == 1)
        assert await r.save(1) == "stored"
        assert r.published("disk") == set()
        files.deleting.open()
        await r.store.settle()
        assert (r.published("disk"), set(files.parts)) == ({1}, {(key(1), 0)})


async def test_a_chunk_that_is_saved_while_a_write_that_nobody_wants_ends_is_written_after_that() -> None:
    """Of two ranks: the file of the first is there, and that of the second is being written."""
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        await r.save(1, 0, 2)
        files.writing.close()
        await r.save(1, 1, 2)
        await until(lambda: files.writing.waiting == 1)
        r.store.evict([key(1)])
        for rank in range(2):
            assert await r.save(1, rank, 2) == "stored"
        files.writing.open()
        await r.store.settle()
        assert r.published("disk") == {1}
        assert set(files.parts) == {(key(1), 0), (key(1), 1)}


async def test_a_chunk_that_is_gone_again_when_its_old_files_are_is_not_written() -> None:
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        await r.save(1)
        await r.store.settle()
        files.deleting.close()
        r.store.evict([key(1)])
        await until(lambda: files.deleting.waiting == 1)
        await r.save(1)
        r.store.evict([key(1)])
        files.deleting.open()
        await r.store.settle()
        assert (r.published("disk"), files.parts) == (set(), {})


async def test_bytes_that_are_still_read_count_against_the_budget() -> None:
    files = MemoryFiles()
    async with rigged(disk=files, chunks=1) as r:
        files.writing.close()
        await r.save(1)
        await until(lambda: files.writing.waiting == 1)
        assert await r.save(2) == "dropped"
        r.store.evict([key(1)], ["dram"])
        assert await r.save(2) == "dropped"
        files.writing.open()
        await r.store.settle()
        assert await r.save(2) == "stored"
        assert files.parts[key(1), 0][1] == payload(1)


async def test_writes_over_the_bound_are_dropped_and_counted() -> None:
    files = MemoryFiles()
    async with rigged(disk=files, chunks=1000, save_mib_in_flight=1) as r:
        files.writing.close()
        at_once = (1 << 20) // NBYTES
        for number in range(at_once + 3):
            assert await r.save(number) == "stored"
        assert r.store.counters.writes_dropped["disk"] == 3
        files.writing.open()
        await r.store.settle()
        assert len(r.published("disk")) == at_once


async def test_the_disk_never_holds_more_than_its_cap_and_the_oldest_leave() -> None:
    files = MemoryFiles(capacity=3 * NBYTES + HEAD_BYTES)
    async with rigged(disk=files) as r:
        for number in range(7):
            await r.save(number)
            await r.store.settle()
            assert files.used <= files.capacity
        assert r.published("disk") == {4, 5, 6}
        assert r.store.counters.evicted["disk"] == 4


async def test_leased_chunks_stay_on_disk_and_what_does_not_fit_is_dropped() -> None:
    files = MemoryFiles(capacity=NBYTES + HEAD_BYTES // 2)
    async with rigged(disk=files) as r:
        await r.save(1)
        await r.store.settle()
        r.lookup(1)
        assert await r.save(2) == "stored"
        await r.store.settle()
        assert r.published("disk") == {1}
        assert r.store.counters.writes_dropped["disk"] == 1


async def test_a_chunk_without_all_its_files_is_no_chunk() -> None:
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        for rank in range(2):
            await r.save(1, rank, 2)
        await r.save(2)
        await r.store.settle()
    del files.parts[key(1), 1]
    async with rigged(disk=files) as r:
        assert r.tiers(1, world_size=2) == [ABSENT]
        assert r.tiers(2) == [DISK]
        assert r.published("disk") == {2}


async def test_a_tier_that_could_not_be_listed_is_listed_later() -> None:
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        await r.save(1)
        await r.store.settle()
    files.readable = False
    async with rigged(disk=files) as r:
        assert r.tiers(1) == [ABSENT]
        files.readable = True
        r.clock.now += 5
        r.store.expire()
        await r.store.settle()
        assert r.tiers(1) == [DISK]


async def test_what_other_nodes_put_into_the_remote_tier_becomes_known() -> None:
    shared = MemoryFiles()
    async with rigged(remote=shared) as reader:
        async with rigged(remote=shared) as writer:
            await writer.save(1)
            await writer.store.settle()
        assert reader.tiers(1) == [ABSENT]
        reader.clock.now += 60
        reader.store.expire()
        await reader.store.settle()
        assert reader.tiers(1) == [REMOTE]
        assert (await reader.load(1))[:2] == ("loaded", REMOTE)


async def test_a_listing_that_knows_only_paths_is_enough() -> None:
    class Paths(MemoryFiles):
        def scan(self):  # type: ignore[no-untyped-def]
            return [
                part._replace(identity=part.identity[:8], world_size=0, tenant="", nbytes=part.nbytes + 300)
                for part in super().scan()
            ]

    shared = Paths()
    async with rigged(remote=shared) as r:
        for rank in range(2):
            await r.save(1, rank, 2, tenant="t")
        await r.store.settle()
    async with rigged(remote=shared) as r:
        assert r.tiers(1, world_size=2) == [REMOTE]
        assert r.tiers(1, world_size=1) == [ABSENT]
        for rank in range(2):
            assert (await r.load(1, rank))[:2] == ("loaded", REMOTE)
        assert r.published("dram") == {1}
        assert r.store.stats().tenants == {"t": 2 * NBYTES}
        for rank in range(2):
            assert await r.save(1, rank, 2, tenant="t") == "present"


async def test_time_to_live_holds_on_disk_and_not_for_what_others_may_use() -> None:
    disk, remote = MemoryFiles(), MemoryFiles()
    async with rigged(disk=disk, remote=remote, ttl_s=100) as r:
        for number in (1, 2):
            await r.save(number)
            await r.store.settle()
        r.clock.now += 60
        r.lookup(1, lease_s=1)
        r.clock.now += 60
        r.store.expire()
        await r.store.settle()
        assert (r.published("dram"), r.published("disk"), r.published("remote")) == ({1}, {1}, {1, 2})
        assert set(disk.parts) == {(key(1), 0)}


async def test_evicting_everything_empties_every_tier_but_for_pins() -> None:
    disk, remote = MemoryFiles(), MemoryFiles()
    async with rigged(disk=disk, remote=remote, chunks=2) as r:
        for number in range(4):
            await r.save(number)
            await r.store.settle()
        r.store.pin([key(0)])
        assert r.store.evict(None) == 3
        await r.store.settle()
        assert set(disk.parts) == set(remote.parts) == {(key(0), 0)}
        assert r.store.tiers_of([key(0), key(3)]) == [("disk", "remote"), ()]
        assert [info.key for info in r.store.ls(10)] == [key(0).hex()]


async def test_a_real_disk_serves_after_a_restart_what_it_had_before(tmp_path: Path) -> None:
    async with rigged(disk=DiskTier(str(tmp_path / "kv"), 1 << 20)) as r:
        for number in range(3):
            await r.save(number, tenant="t", cost_s=0.25)
        await r.store.settle()
    async with rigged(disk=DiskTier(str(tmp_path / "kv"), 1 << 20)) as r:
        assert r.published("disk") == {0, 1, 2}
        assert r.tiers(0, 1, 2) == [DISK] * 3
        for number in range(3):
            assert (await r.load(number))[:2] == ("loaded", DISK)
        assert r.store.stats().tenants == {"t": 3 * NBYTES}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
async def test_a_damaged_file_of_a_real_disk_is_never_loaded(tmp_path: Path, damage: str) -> None:
    tier = DiskTier(str(tmp_path / "kv"), 1 << 20)
    async with rigged(disk=tier) as r:
        await r.save(1)
        await r.store.settle()
        r.store.evict([key(1)], ["dram"])
        (file,) = (tmp_path / "kv").rglob("*.kv")
        data = bytearray(file.read_bytes())
        if damage == "flip":
            data[-1] ^= 1
            file.write_bytes(data)
        elif damage == "truncate":
            file.write_bytes(data[:-1])
        else:
            file.unlink()
        expected = "missing" if damage == "remove" else "corrupt"
        assert (await r.load(1)).outcome == expected
        await r.store.settle()
        assert r.tiers(1) == [ABSENT]
        assert not list((tmp_path / "kv").rglob("*.kv"))
        assert await r.save(1) == "stored"
        await r.store.settle()
        tier.check_integrity()


async def test_a_real_disk_at_its_cap_keeps_to_it(tmp_path: Path) -> None:
    tier = DiskTier(str(tmp_path / "kv"), 4 * (NBYTES + 4096))
    async with rigged(disk=tier, chunks=100) as r:
        for number in range(30):
            await r.save(number)
            assert tier.used <= tier.capacity
        await r.store.settle()
        tier.check_integrity()
        assert 3 <= len(r.published("disk")) <= 7
        assert r.store.stats().tiers["disk"].bytes == tier.used <= tier.capacity


async def test_the_store_s_numbers_of_a_tier_are_those_of_its_files() -> None:
    files = MemoryFiles()
    async with rigged(disk=files) as r:
        for number in range(3):
            await r.save(number)
        await r.store.settle()
        tier = r.store.stats().tiers["disk"]
        assert (tier.chunks, tier.bytes, tier.healthy) == (3, files.used, True)
        assert msgspec.to_builtins(r.store.counters)["writes"]["disk"] == 3
