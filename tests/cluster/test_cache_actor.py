"""Cache actors on a real Ray with two nodes: made, found, restarted, replaced, and moving chunks between nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from cache_store.cache_messages import CacheInfo
from cache_store.chunk import verify
from cache_store.client import StoreClient
from cache_store.config import CacheConfig
from cache_store.events import ChunkKey, pack_keys
from cache_store.node_errors import CacheSetupError
from cache_store.store_stats import StoreStats
from cache_store.wire import ABSENT, DISK, DRAM, PEER, WIRE_VERSION, Found, Register, Source
from cluster.state import ClusterState
from router.cache_directory import CacheDirectory
from router.index import PrefixIndex
from tests.chunk_parts import IDENTITY, Part, make_part
from tests.cluster.deployed import wait_for
from tests.cluster.second_node import SecondNode, alive_nodes

pytestmark = pytest.mark.ray

APP = "cache-tests"
SECRET = "the-secret-of-these-tests"
MIB = 1 << 20
CONFIG = {"share": "on", "dram": {"mib": 24}}


@pytest.fixture(scope="module")
def nodes(ray_head: ClusterState) -> Iterator[tuple[str, str]]:
    """Two Ray node ids."""
    (first,) = alive_nodes()
    with SecondNode(ray_head) as second:
        yield first, second.id


@pytest.fixture
def make_cache(nodes: tuple[str, str]) -> Iterator[Callable[..., CacheInfo]]:
    import ray

    from cache_store.node_actor import NAMESPACE, actor_name, ensure_cache_actor

    def make(node: str, **sections: Any) -> CacheInfo:
        config = CacheConfig.model_validate(CONFIG | sections)
        return asyncio.run(ensure_cache_actor(APP, SECRET, config, node))

    yield make
    for node in nodes:
        try:
            actor = ray.get_actor(actor_name(APP, node), NAMESPACE)
        except ValueError:
            continue
        wait_for("the actor answers", partial(answers, actor))
        ray.get(actor.check_integrity.remote(), timeout=20)
        ray.kill(actor)


@pytest.fixture
def connect() -> Iterator[Callable[[CacheInfo], StoreClient]]:
    clients: list[StoreClient] = []

    def make(info: CacheInfo) -> StoreClient:
        register = Register(
            WIRE_VERSION, "engine", IDENTITY, rank=0, world_size=1, slots=2, slot_bytes=4 * MIB
        )
        client = StoreClient(Path(info.socket), register)
        clients.append(client)
        assert client.wait_alive(20)
        return client

    yield make
    for client in clients:
        client.close()


def answers(actor: Any) -> bool:
    """Not while it is being restarted."""
    import ray

    try:
        return bool(ray.get(actor.pid.remote(), timeout=20))
    except ray.exceptions.ActorUnavailableError:
        return False


def pid_of(node: str) -> int:
    import ray

    from cache_store.node_actor import NAMESPACE, actor_name

    pid: int = ray.get(ray.get_actor(actor_name(APP, node), NAMESPACE).pid.remote(), timeout=20)
    return pid


def save(client: StoreClient, part: Part) -> str:
    slot = client.take_slot()
    assert slot is not None
    slot.view[: len(part.payload)] = part.payload
    outcome = client.save(part.header, slot).result(20).outcome
    slot.release()
    return outcome


def look_up(client: StoreClient, *parts: Part, sources: tuple[Source, ...] = ()) -> Found:
    keys = pack_keys([ChunkKey(part.header.key) for part in parts])
    return client.lookup(keys, 1, sources, limit_s=20).result(25)


def tiers(client: StoreClient, *parts: Part) -> list[int]:
    found = look_up(client, *parts)
    if found.lease:
        client.release(found.lease)
    return list(found.tiers)


def load(client: StoreClient, part: Part) -> tuple[str, int]:
    """Outcome and tier; what is loaded must be the part."""
    slot = client.take_slot()
    assert slot is not None
    loaded = client.load(part.header.key, slot, limit_s=20).result(25)
    if loaded.outcome == "loaded":
        assert loaded.header is not None
        payload = slot.view[: loaded.header.nbytes]
        verify(loaded.header, payload, key=part.header.key, identity=IDENTITY, rank=0, world_size=1)
        assert payload == part.payload
        del payload
    slot.release()
    return loaded.outcome, loaded.tier


async def stats_of(info: CacheInfo) -> StoreStats:
    async with (
        aiohttp.ClientSession(headers={"x-manta-secret": SECRET}) as session,
        session.get(f"http://{info.address}/manta/cache/stats") as answer,
    ):
        return msgspec.msgpack.decode(await answer.read(), type=StoreStats)


def test_a_chunk_is_kept_in_the_nodes_memory_and_loaded_from_there(
    nodes: tuple[str, str], make_cache: Callable[..., CacheInfo], connect: Callable[[CacheInfo], StoreClient]
) -> None:
    info = make_cache(nodes[0])
    client = connect(info)
    part = make_part(1, 2 * MIB)
    assert tiers(client, part) == [ABSENT]
    assert save(client, part) == "stored"
    assert save(client, part) == "present"
    assert tiers(client, part) == [DRAM]
    assert load(client, part) == ("loaded", DRAM)
    stats = asyncio.run(stats_of(info))
    assert stats.tiers["dram"].bytes == 2 * MIB
    assert stats.counters.loaded_bytes["dram"] == 2 * MIB


def test_a_chunk_moves_to_another_node_that_is_told_where_it_is(
    nodes: tuple[str, str], make_cache: Callable[..., CacheInfo], connect: Callable[[CacheInfo], StoreClient]
) -> None:
    there, here = make_cache(nodes[0]), make_cache(nodes[1])
    parts = [make_part(number, 2 * MIB) for number in (1, 2, 3)]
    giver, taker = connect(there), connect(here)
    assert [save(giver, part) for part in parts] == ["stored"] * 3
    assert tiers(taker, *parts) == [ABSENT] * 3
    found = look_up(taker, *parts, sources=(Source(nodes[0], 0, 3),))
    assert list(found.tiers) == [PEER] * 3
    assert [load(taker, part) for part in parts] == [("loaded", PEER)] * 3
    taker.release(found.lease)
    stats = asyncio.run(stats_of(here))
    assert stats.counters.moved["peer"] == 3
    assert stats.counters.loaded_bytes["peer"] + stats.counters.loaded_bytes["dram"] == 6 * MIB
    # They are this node's own now: they survive their giver.
    os.kill(pid_of(nodes[0]), signal.SIGKILL)
    assert [load(taker, part)[0] for part in parts] == ["loaded"] * 3


def test_a_killed_actor_is_back_at_its_address_with_what_is_on_its_disk(
    nodes: tuple[str, str],
    make_cache: Callable[..., CacheInfo],
    connect: Callable[[CacheInfo], StoreClient],
    tmp_path: Path,
) -> None:
    disk = {"path": str(tmp_path), "mib": 64, "admission": "always"}
    info = make_cache(nodes[0], disk=disk)
    client = connect(info)
    part = make_part(5, 2 * MIB)
    assert save(client, part) == "stored"
    wait_for("written", lambda: asyncio.run(stats_of(info)).tiers["disk"].chunks == 1)
    before = pid_of(nodes[0])
    os.kill(before, signal.SIGKILL)
    wait_for("connected again", lambda: client.stats().sessions == 2 and client.alive)
    assert make_cache(nodes[0], disk=disk) == info
    assert pid_of(nodes[0]) != before
    assert tiers(client, part) == [DISK]
    assert load(client, part) == ("loaded", DISK)


def test_another_configuration_makes_another_actor_that_finds_the_disk(
    nodes: tuple[str, str],
    make_cache: Callable[..., CacheInfo],
    connect: Callable[[CacheInfo], StoreClient],
    tmp_path: Path,
) -> None:
    disk = {"path": str(tmp_path), "mib": 64, "admission": "always"}
    first = make_cache(nodes[0], disk=disk)
    client = connect(first)
    part = make_part(6, MIB)
    assert save(client, part) == "stored"
    wait_for("written", lambda: asyncio.run(stats_of(first)).tiers["disk"].chunks == 1)
    before = pid_of(nodes[0])
    make_cache(nodes[0], disk=disk)
    assert pid_of(nodes[0]) == before
    second = make_cache(nodes[0], disk=disk | {"mib": 32})
    assert second.socket == first.socket
    assert pid_of(nodes[0]) != before
    wait_for("connected again", lambda: client.stats().sessions == 2 and client.alive)
    assert load(client, part) == ("loaded", DISK)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"dram": {"mib": 100_000}}, r"cache\.dram\.mib is 100000 .* has 120 MiB"),
        ({"remote": {"uri": "carrier-pigeon://x"}}, "carrier-pigeon"),
    ],
)
def test_a_cache_that_a_node_cant_have_is_refused_with_the_reason(
    nodes: tuple[str, str], make_cache: Callable[..., CacheInfo], sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(CacheSetupError, match=said):
        make_cache(nodes[0], **sections)


def test_a_folder_that_is_somebody_elses_is_refused(
    nodes: tuple[str, str], make_cache: Callable[..., CacheInfo], tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(CacheSetupError, match=str(tmp_path)):
        make_cache(nodes[0], disk={"path": str(tmp_path)})
    assert (tmp_path / "thesis.tex").read_text() == "all of it"


async def test_routers_find_all_caches_and_make_those_that_every_node_shall_have(
    nodes: tuple[str, str], make_cache: Callable[..., CacheInfo]
) -> None:
    from router.cache_discovery import CacheDiscovery

    first = await asyncio.to_thread(make_cache, nodes[0])
    index = PrefixIndex()
    directory = CacheDirectory(index, SECRET, lambda: 10.0)
    config = CacheConfig.model_validate(CONFIG)
    discovery = asyncio.create_task(CacheDiscovery(directory, APP, SECRET, config).run())
    try:
        await _until(lambda: [entry.info for entry in directory if entry.stream.connected] == [first])
    finally:
        discovery.cancel()
    everywhere = config.model_copy(update={"every_node": True})
    discovery = asyncio.create_task(CacheDiscovery(directory, APP, SECRET, everywhere).run())
    try:
        await _until(lambda: {entry.info.node for entry in directory} == set(nodes))
    finally:
        discovery.cancel()
        await directory.close()


async def _until(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.05)
