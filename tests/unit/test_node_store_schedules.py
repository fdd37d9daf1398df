"""Eight clients at once, in random order, abandoning what they began: the store's books are right at the end."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from cache_store.disk import DiskTier
from cache_store.file_tier import FileTier
from cache_store.wire import DISK, DRAM, PEER, Source
from tests.store_rig import NBYTES, MemoryFiles, OtherNodes, Rig, flipped, header, key, payload

CLIENTS = 8
STEPS = 150
CHUNKS = 24
TENANTS = ("", "a", "b")


def world_size(number: int) -> int:
    return 1 + number % 2


def tenant(number: int) -> str:
    return TENANTS[number % 3]


class Client:
    """Does what an engine, a router or an operator does; what it loads must be right."""

    def __init__(self, rig: Rig, there: Rig, seed: int) -> None:
        self._rig, self._there = rig, there
        self._store = rig.store
        self._random = random.Random(seed)
        self._leases: list[int] = []
        self.loaded = 0

    async def run(self) -> None:
        steps = [self._save, self._save, self._look_up, self._load, self._load, self._release, self._abort]
        steps += [self._pin, self._evict, self._corrupt, self._lend, self._prefetch, self._wait]
        for _ in range(STEPS):
            await self._random.choice(steps)()
        for lease in self._leases:
            self._store.release(lease)

    def _one(self) -> int:
        return self._random.randrange(CHUNKS)

    async def _save(self) -> None:
        number = self._one()
        node = self._rig if self._random.random() < 0.8 else self._there
        ranks = list(range(world_size(number)))
        self._random.shuffle(ranks)
        for rank in ranks:
            await node.save(number, rank, world_size(number), tenant=tenant(number))

    async def _look_up(self) -> None:
        first = self._one()
        numbers = [number for number in range(first, min(first + 8, CHUNKS)) if number % 2 == first % 2]
        sources = (Source("there", 0, len(numbers)),) if self._random.random() < 0.5 else ()
        found = self._rig.lookup(
            *numbers,
            world_size=world_size(first),
            sources=sources,
            lease_s=self._random.choice([0.0, 5.0, 60.0]),
        )
        self._leases.append(found.lease)

    async def _load(self) -> None:
        number = self._one()
        rank = self._random.randrange(world_size(number))
        result = await self._rig.load(number, rank, self._random.choice([0.0, 0.001, 30.0]))
        self.loaded += result.outcome == "loaded"

    async def _release(self) -> None:
        if self._leases:
            self._store.release(self._leases.pop(self._random.randrange(len(self._leases))))

    async def _abort(self) -> None:
        """A client that leaves in the middle: its memory is its own again at once."""
        number, view = self._one(), memoryview(bytearray(payload(0)))
        if self._random.random() < 0.5:
            work = asyncio.ensure_future(self._store.load_into(key(number), 0, view, 30.0))
        else:
            made = header(number, 0, world_size(number), tenant=tenant(number))
            view[:] = payload(number)
            work = asyncio.ensure_future(self._store.save(made, view.toreadonly()))
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.wait([work])
        view.release()

    async def _pin(self) -> None:
        keys = [key(self._one()) for _ in range(3)]
        self._store.pin(keys[:2])
        self._store.unpin(keys[1:])

    async def _evict(self) -> None:
        tiers = self._random.choice([("dram",), ("disk",), ("dram", "disk", "remote")])
        if self._random.random() < 0.1:
            self._store.evict(None, tiers)
        else:
            self._store.evict([key(self._one()) for _ in range(2)], tiers)

    async def _corrupt(self) -> None:
        self._store.corrupt(key(self._one()), self._random.choice([DRAM, DISK, PEER, 99]))
        bad = flipped(header(self._one(), 5, 3))
        assert await self._store.save(bad, memoryview(bytes(NBYTES))) == "refused"

    async def _lend(self) -> None:
        self._store.lend([key(self._one())], self._random.choice([0.0, 5.0]))

    async def _prefetch(self) -> None:
        first = self._one()
        keys = [key(number) for number in range(first, min(first + 6, CHUNKS)) if number % 2 == first % 2]
        sources = (Source("there", 0, len(keys)),) if self._random.random() < 0.5 else ()
        self._store.prefetch(keys, world_size(first), sources)

    async def _wait(self) -> None:
        self._rig.clock.now += self._random.choice([0.0, 1.0, 20.0])
        self._store.expire()
        for _ in range(self._random.randrange(5)):
            await asyncio.sleep(0)


async def run_schedule(seed: int, disk: FileTier | None) -> None:
    others = OtherNodes()
    there = Rig(node="there", chunks=6)
    rig = Rig(
        chunks=10,
        disk=disk,
        others=others,
        ttl_s=50,
        dram={"eviction": ("lru", "s3fifo", "cost")[seed % 3]},
        disk_config={"admission": ("always", "second_touch")[seed % 2]},
    )
    others.stores["there"] = there.store
    await there.store.start()
    await rig.store.start()
    clients = [Client(rig, there, 100 * seed + number) for number in range(CLIENTS)]
    await asyncio.gather(*(client.run() for client in clients))

    for each in (rig, there):
        each.store.check_integrity()
        await each.store.settle()
        each.store.check_rest()
        assert each.store.stats().dram_in_use <= each.store.stats().tiers["dram"].capacity
    assert sum(client.loaded for client in clients) > 0
    if isinstance(disk, DiskTier):
        disk.check_integrity()
        assert disk.used == rig.store.stats().tiers["disk"].bytes
    for each in (rig, there):
        each.clock.now += 1000
        each.store.expire()
        assert (each.store.stats().leases, each.store.stats().leased) == (0, 0)
        await each.close()


@pytest.mark.parametrize("seed", range(10))
async def test_schedules_in_memory(seed: int) -> None:
    await run_schedule(seed, MemoryFiles(capacity=16 * NBYTES) if seed % 3 else None)


@pytest.mark.parametrize("seed", range(10, 20))
async def test_schedules_with_a_real_disk(seed: int, tmp_path: Path) -> None:
    disk = DiskTier(str(tmp_path / "kv"), 12 * (NBYTES + 512))
    await run_schedule(seed, disk)
