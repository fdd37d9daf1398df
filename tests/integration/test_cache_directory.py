"""Routers and cache actors: what a node's store holds is in the index, and what a router may ask of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import msgspec
import pytest

from cache_store.app_server import AppServer, bound_socket
from cache_store.cache_http import CacheApp
from cache_store.cache_messages import (
    EVICT_PATH,
    LIST_PATH,
    PIN_PATH,
    STATS_PATH,
    UNPIN_PATH,
    WHERE_PATH,
    Affected,
    CacheInfo,
    KeysRequest,
    Where,
)
from cache_store.cache_metrics import registry
from cache_store.chunk import Header, checksum
from cache_store.config import CacheConfig
from cache_store.events import ChunkKey, Load, pack_keys
from cache_store.node_store import NodeStore
from cache_store.object_space import HeapSpace
from cache_store.store_socket import SocketCounters, SocketStats
from cache_store.store_stats import ChunkInfo, StoreStats
from cache_store.stream import Publisher
from router.cache_directory import CacheDirectory, CacheUnavailable
from router.index import PrefixIndex
from tests.integration.in_process import HOST, SECRET, until

KEYS = [ChunkKey(bytes([number]) * 32) for number in range(1, 9)]
NO_SOCKET = SocketStats(connections=0, open_requests=0, staging_bytes=0, counters=SocketCounters())
IDLE = Load(waiting=0, running=0, prefill_tokens=0, kv_used=0.0, prefill_rate=0.0, decode_rate=0.0)


@dataclass
class Cache:
    """A node's cache actor but for Ray."""

    info: CacheInfo
    store: NodeStore
    publisher: Publisher
    server: AppServer

    async def save(self, *keys: ChunkKey) -> None:
        for key in keys:
            payload = key * 32
            header = Header(
                key=key, parent=bytes(32), identity=bytes(32), rank=0, world_size=1, tokens=64, dtype="float32",
                shape=(1, 1, len(payload)), nbytes=len(payload), checksum=checksum(memoryview(payload)),
                created=time.time(),
            )  # fmt: skip
            assert await self.store.save(header, memoryview(payload)) == "stored"


async def start_cache(node: str, epoch: int = 1, port: int = 0) -> Cache:
    publisher = Publisher(holder=f"cache-{node}", epoch=epoch, identity=b"", chunk_tokens=64, tiers=("dram",))
    store = NodeStore(
        node=node, config=CacheConfig(), dram_bytes=1 << 20, space=HeapSpace(), publisher=publisher
    )
    await store.start()
    app = CacheApp(store, publisher, SECRET, registry(store.stats, lambda: NO_SOCKET))
    server = AppServer([app], [bound_socket(HOST, port)])
    await server.start()
    publisher.report(IDLE)
    return Cache(CacheInfo(f"cache-{node}", node, server.addresses[0], ""), store, publisher, server)


@pytest.fixture
async def caches() -> AsyncIterator[list[Cache]]:
    started = [await start_cache("aa"), await start_cache("bb")]
    yield started
    for cache in started:
        await cache.server.stop()
        await cache.store.close()
        cache.store.check_integrity()


@pytest.fixture
async def directory(caches: list[Cache]) -> AsyncIterator[CacheDirectory]:
    made = CacheDirectory(PrefixIndex(), SECRET, lambda: 10.0)
    made.update([cache.info for cache in caches])
    await until(lambda: all(entry.stream.connected for entry in made))
    yield made
    await made.close()


async def test_what_is_saved_is_in_the_index_and_what_is_evicted_leaves_it(
    caches: list[Cache], directory: CacheDirectory
) -> None:
    index = directory._index
    await caches[0].save(*KEYS[:4])
    await until(lambda: index.held("cache-aa", "dram") == set(KEYS[:4]))
    assert caches[0].store.evict(KEYS[:1]) == 1
    await until(lambda: index.held("cache-aa", "dram") == set(KEYS[1:4]))
    assert directory.holder("aa") == "cache-aa"
    assert directory.nodes() == {"cache-aa": "aa", "cache-bb": "bb"}


async def test_a_cache_that_dies_leaves_the_index_and_comes_back_as_what_it_then_is(
    caches: list[Cache], directory: CacheDirectory
) -> None:
    index = directory._index
    await caches[0].save(*KEYS[:4])
    await until(lambda: len(index.held("cache-aa", "dram")) == 4)
    port = int(caches[0].info.address.rpartition(":")[2])
    await caches[0].server.stop()
    await caches[0].store.close()
    await until(lambda: not index.held("cache-aa", "dram"))
    caches[0] = await start_cache("aa", epoch=2, port=port)
    await caches[0].save(KEYS[6])
    await until(lambda: index.held("cache-aa", "dram") == {KEYS[6]})


async def test_a_node_that_is_named_no_more_leaves_the_index(
    caches: list[Cache], directory: CacheDirectory
) -> None:
    await caches[1].save(KEYS[0])
    await until(lambda: directory._index.held("cache-bb", "dram"))
    directory.update([caches[0].info])
    assert not directory._index.held("cache-bb", "dram")
    assert directory.holder("bb") == ""


async def test_a_router_can_ask_where_pin_unpin_and_evict(
    caches: list[Cache], directory: CacheDirectory
) -> None:
    await caches[0].save(*KEYS[:2])
    entry = next(iter(directory))
    asked = KeysRequest(pack_keys(KEYS[:3]))
    where = await directory.ask(entry, "POST", WHERE_PATH, Where, asked)
    assert where.tiers == [("dram",), ("dram",), ()]
    assert await directory.ask(entry, "POST", PIN_PATH, Affected, asked) == Affected(2)
    assert await directory.ask(entry, "POST", EVICT_PATH, Affected, KeysRequest(b"")) == Affected(0)
    assert await directory.ask(entry, "POST", UNPIN_PATH, Affected, asked) == Affected(2)
    assert await directory.ask(entry, "POST", EVICT_PATH, Affected, KeysRequest(b"")) == Affected(2)


async def test_a_router_can_ask_for_numbers_and_a_listing(
    caches: list[Cache], directory: CacheDirectory
) -> None:
    await caches[0].save(*KEYS[:2])
    entry = next(iter(directory))
    stats = await directory.ask(entry, "GET", STATS_PATH, StoreStats)
    assert (stats.node, stats.tiers["dram"].chunks, stats.counters.saves["stored"]) == ("aa", 2, 2)
    listed = await directory.ask(entry, "GET", f"{LIST_PATH}?limit=1", list[ChunkInfo])
    assert len(listed) == 1
    assert listed[0].tiers == ("dram",)


async def test_a_cache_that_is_gone_is_an_error_that_names_it(
    caches: list[Cache], directory: CacheDirectory
) -> None:
    entry = next(iter(directory))
    await caches[0].server.stop()
    with pytest.raises(CacheUnavailable, match="cache-aa"):
        await directory.ask(entry, "GET", STATS_PATH, StoreStats)


async def test_without_the_secret_nothing_is_answered(caches: list[Cache]) -> None:
    async with aiohttp.ClientSession() as session:
        for path in (STATS_PATH, "/manta/events", "/manta/snapshot", "/metrics"):
            async with session.get(f"http://{caches[0].info.address}{path}") as answer:
                assert answer.status == 401
        async with session.post(f"http://{caches[0].info.address}{EVICT_PATH}", data=b"") as answer:
            assert answer.status == 401


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgspec.msgpack.encode({"keys": b"short"}), b"x" * (17 << 20)]
)
async def test_a_body_that_is_none_is_refused_and_nothing_else_happens(
    caches: list[Cache], body: bytes
) -> None:
    await caches[0].save(KEYS[0])
    async with aiohttp.ClientSession(headers={"x-manta-secret": SECRET}) as session:
        async with session.post(f"http://{caches[0].info.address}{EVICT_PATH}", data=body) as answer:
            assert answer.status == 400
        async with session.get(f"http://{caches[0].info.address}/metrics") as answer:
            text = await answer.text()
    assert 'manta_cache_chunks{tier="dram"} 1.0' in text


async def test_a_prefetch_is_asked_for_and_not_waited_for(
    caches: list[Cache], directory: CacheDirectory
) -> None:
    asked: list[int] = []
    real = caches[0].store.prefetch

    def prefetch(keys: list[ChunkKey], *rest: object) -> int:
        asked.append(len(keys))
        return real(keys, *rest)  # type: ignore[arg-type]

    caches[0].store.prefetch = prefetch  # type: ignore[method-assign,assignment]
    directory.prefetch("aa", KEYS[:3], [])
    directory.prefetch("unknown", KEYS[:3], [])
    await until(lambda: asked == [3])
    await asyncio.gather(*directory._prefetches)
