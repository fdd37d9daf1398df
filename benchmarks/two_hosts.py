"""Chunks of another host, from its actor's memory to verified bytes in an engine's staging area, beside `ray.get`.

    python -m benchmarks.two_hosts RAY_ADDRESS OWNER_HOSTNAME ROUNDS

Runs on the reading host of a lab and prints JSON: seconds per chunk of each round, of ours and of `ray.get` of as many
objects, all asked for at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.store_nodes import APP, IDENTITY, SECRET, CacheNode, key_of, save
from benchmarks.store_transfer import LIMIT_S, check, take
from benchmarks.store_workload import CHUNK_BYTES, CHUNKS, payload
from cache_store.client import StoreClient
from cache_store.config import CacheConfig
from cache_store.node_actor import ensure_cache_actor
from cache_store.wire import PEER, WIRE_VERSION, Register, Source

CONFIG = CacheConfig.model_validate({"share": "on", "dram": {"mib": 4 * CHUNKS * CHUNK_BYTES >> 20}})
KEYS = [key_of(number) for number in range(CHUNKS)]
WAIT_S = 60.0


def main() -> None:
    address, owner, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
    ray.init(address=address, namespace="manta", log_to_driver=False, logging_level=logging.ERROR)
    nodes = {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    here, there = nodes[socket.gethostname()], nodes[owner]
    infos = {node: asyncio.run(ensure_cache_actor(APP, SECRET, CONFIG, node)) for node in (here, there)}
    on_owner = NodeAffinitySchedulingStrategy(there, soft=False)
    remote: Any = ray.remote(Owner)
    other = remote.options(num_cpus=0, scheduling_strategy=on_owner).remote(infos[there].socket)
    client, node = connected(infos[here].socket), CacheNode(infos[here], 0, CONFIG)
    found: dict[str, list[float]] = {"manta": [], "ray": []}
    # The first round opens the connections and is not counted.
    for number in range(rounds + 1):
        node.evict(KEYS)
        node.wait_quiet()
        ray.get(other.renew.remote(), timeout=WAIT_S)
        ways = [("manta", partial(read, client, there)), ("ray", partial(get, other))]
        for name, way in ways if number % 2 else reversed(ways):
            seconds = way()
            if number:
                found[name].append(seconds / CHUNKS)
    client.close()
    print(json.dumps(found))


class Owner:
    """On the other host: saves chunks to its actor, and owns plain objects of the same size."""

    def __init__(self, path: str) -> None:
        self._client = connected(path)
        self._payloads = [payload(number) for number in range(CHUNKS)]
        self._refs: list[Any] = []
        for key, data in zip(KEYS, self._payloads, strict=True):
            save(self._client, key, data)

    def renew(self) -> None:
        """Make new objects, of which no other node has copies."""
        import numpy as np

        self._refs.clear()
        self._refs += [ray.put(np.frombuffer(data, np.uint8)) for data in self._payloads]

    def refs(self) -> list[Any]:
        return self._refs


def read(client: StoreClient, node: str) -> float:
    """Seconds from the look-up to the last verified chunk, which this host's actor does not have yet."""
    slots = [take(client) for _ in KEYS]
    began = time.perf_counter()
    found = client.lookup(b"".join(KEYS), 1, (Source(node, 0, CHUNKS),), limit_s=LIMIT_S).result(LIMIT_S)
    loads = [client.load(key, slot, LIMIT_S) for key, slot in zip(KEYS, slots, strict=True)]
    tiers = []
    for key, load, slot in zip(KEYS, loads, slots, strict=True):
        loaded = load.result(LIMIT_S)
        check(key, loaded, slot)
        tiers.append(loaded.tier)
    seconds = time.perf_counter() - began
    client.release(found.lease)
    for slot in slots:
        slot.release()
    assert tiers == [PEER] * CHUNKS, f"chunks came from tiers {tiers}"
    return seconds


def get(owner: Any) -> float:
    refs = ray.get(owner.refs.remote(), timeout=WAIT_S)
    began = time.perf_counter()
    ray.get(refs, timeout=WAIT_S)
    return time.perf_counter() - began


def connected(path: str) -> StoreClient:
    register = Register(
        WIRE_VERSION, "bench", IDENTITY, rank=0, world_size=1, slots=CHUNKS, slot_bytes=CHUNK_BYTES
    )
    client = StoreClient(Path(path), register)
    if not client.wait_alive(WAIT_S):
        raise TimeoutError(f"no connection to {path}")
    return client


if __name__ == "__main__":
    main()
