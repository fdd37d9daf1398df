"""Ray nodes on this machine, each with a real cache actor."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from benchmarks import peers
from benchmarks.harness import cpu_seconds
from cache_store.cache_messages import EVICT_PATH, STATS_PATH, WHERE_PATH, CacheInfo, KeysRequest, Where
from cache_store.chunk import Header, checksum
from cache_store.client import StoreClient
from cache_store.config import CacheConfig
from cache_store.events import ChunkKey, pack_keys
from cache_store.store_stats import StoreStats
from cache_store.wire import WIRE_VERSION, Register

APP = "bench-store"
SECRET = "the-secret-of-a-benchmark"
IDENTITY = bytes(range(32))
"""Of chunks that no engine computed."""
HTTP_TIMEOUT_S = 30.0
DEADLINE_S = 60.0


class CacheNode:
    """One node's cache actor."""

    def __init__(self, info: CacheInfo, pid: int, config: CacheConfig) -> None:
        self.info = info
        self.pid = pid
        self.config = config

    @property
    def id(self) -> str:
        """Ray node id."""
        return self.info.node

    @contextmanager
    def client(self, slots: int, slot_bytes: int, identity: bytes = IDENTITY) -> Iterator[StoreClient]:
        register = Register(
            WIRE_VERSION, "bench", identity, rank=0, world_size=1, slots=slots, slot_bytes=slot_bytes
        )
        client = StoreClient(Path(self.info.socket), register)
        try:
            if not client.wait_alive(DEADLINE_S):
                raise TimeoutError(f"no connection to {self.info.socket}")
            yield client
        finally:
            client.close()

    def stats(self) -> StoreStats:
        return msgspec.msgpack.decode(self._http(STATS_PATH), type=StoreStats)

    def where(self, keys: Sequence[ChunkKey]) -> list[tuple[str, ...]]:
        answer = self._http(WHERE_PATH, KeysRequest(pack_keys(keys)))
        return msgspec.msgpack.decode(answer, type=Where).tiers

    def evict(self, keys: Sequence[ChunkKey]) -> None:
        """From every tier of the node."""
        self._http(EVICT_PATH, KeysRequest(pack_keys(keys)))

    def wait_for(self, keys: Sequence[ChunkKey], tier: str) -> None:
        wait_until(lambda: all(tier in tiers for tiers in self.where(keys)), f"{len(keys)} chunks in {tier}")

    def wait_quiet(self) -> None:
        """Until nothing is saved or moved."""

        def quiet() -> bool:
            stats = self.stats()
            return not stats.saving and not stats.flights

        wait_until(quiet, "a quiet store")

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.pid, tree=False)

    def _http(self, path: str, body: KeysRequest | None = None) -> bytes:
        request = urllib.request.Request(
            f"http://{self.info.address}{path}",
            data=None if body is None else msgspec.msgpack.encode(body),
            headers={"x-manta-secret": SECRET},
        )
        with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:
            data: bytes = answer.read()
            return data


@contextmanager
def cache_nodes(
    sections: Sequence[Mapping[str, Any]], object_store_mib: int = 512
) -> Iterator[list[CacheNode]]:
    """A Ray of its own with a node, and a cache actor on it, for each `cache` section."""
    from cluster import ray_cluster

    path = os.pathsep.join(filter(None, (str(peers.ROOT), os.environ.get("PYTHONPATH"))))
    with ExitStack() as stack:
        state = stack.enter_context(tempfile.TemporaryDirectory(prefix="mb-", dir="/tmp"))
        stack.enter_context(mock.patch.dict(os.environ, {"MANTA_STATE": state, "PYTHONPATH": path}))
        ray_cluster.use_local_ray()
        import ray

        from tests.cluster.second_node import SecondNode, alive_nodes

        head = _start_head(object_store_mib)
        stack.callback(ray_cluster.stop, head)
        stack.enter_context(terminated_is_exit())
        ray.init(
            address=head.ray_address, namespace="manta", log_to_driver=False, logging_level=logging.ERROR
        )
        stack.callback(ray.shutdown)
        # Ray has put a handler of its own there, which aborts the process.
        stack.enter_context(terminated_is_exit())
        ids = sorted(alive_nodes())
        for _ in sections[1:]:
            ids.append(stack.enter_context(SecondNode(head, object_store_mib)).id)
        yield [_cache_node(node, section) for node, section in zip(ids, sections, strict=True)]


@contextmanager
def terminated_is_exit() -> Iterator[None]:
    """A SIGTERM unwinds this process, so that what it has started is stopped."""

    def leave(*_: object) -> None:
        sys.exit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start_head(object_store_mib: int) -> Any:
    from cluster import ray_cluster
    from cluster.config import ClusterConfig

    ports = ray_cluster.free_ports(2)
    config = ClusterConfig.parse(
        {
            "name": APP,
            "engine": {"kind": "sim"},
            "http": {"port": ports[0]},
            "ray": {"port": ports[1], "object_store_mib": object_store_mib},
        }
    )
    return ray_cluster.start(config, APP, config.endpoint)


def _cache_node(node: str, section: Mapping[str, Any]) -> CacheNode:
    import ray

    from cache_store.node_actor import NAMESPACE, actor_name, ensure_cache_actor

    config = CacheConfig.model_validate(section)
    info = asyncio.run(ensure_cache_actor(APP, SECRET, config, node))
    pid = ray.get(ray.get_actor(actor_name(APP, node), NAMESPACE).pid.remote(), timeout=DEADLINE_S)
    return CacheNode(info, pid, config)


def save(client: StoreClient, key: ChunkKey, payload: bytes) -> None:
    """Raises RuntimeError for a chunk that is not kept."""
    slot = client.take_slot()
    if slot is None:
        raise RuntimeError("no free slot")
    try:
        slot.view[: len(payload)] = payload
        outcome = client.save(header_of(key, payload), slot, DEADLINE_S).result(DEADLINE_S).outcome
    finally:
        slot.release()
    if outcome not in ("stored", "present"):
        raise RuntimeError(f"a chunk was not saved: {outcome}")


def header_of(key: ChunkKey, payload: bytes) -> Header:
    return Header(
        key=key, parent=bytes(32), identity=IDENTITY, rank=0, world_size=1, tokens=256, dtype="bfloat16",
        shape=(1, 1, len(payload)), nbytes=len(payload), checksum=checksum(payload), created=time.time(),
    )  # fmt: skip


def key_of(number: int) -> ChunkKey:
    return ChunkKey(random.Random(f"key {number}").randbytes(32))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.02)
