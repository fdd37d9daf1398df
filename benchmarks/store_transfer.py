"""The store alone: from the question to verified bytes in the engine's staging area, beside Mooncake and memcpy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from benchmarks import peers
from benchmarks.harness import Report, interleaved, paired_ratio
from benchmarks.line_process import ChildError, LineProcess
from benchmarks.store_nodes import IDENTITY, cache_nodes, key_of, save
from benchmarks.store_workload import CHUNK_BYTES, CHUNKS, payload
from cache_store.chunk import checksum, verify
from cache_store.client import Slot, StoreClient
from cache_store.events import ChunkKey
from cache_store.wire import Loaded

MOONCAKE = "Mooncake, TCP get_into"
FASTER = 5.0
LIMIT_S = 30.0

Reads = Callable[[], float]
"""Seconds per chunk."""


def transfer_figures(report: Report, rounds: int, on_round: Callable[[str], None]) -> None:
    name = "4 MiB verified in the staging area, same node"
    with ExitStack() as stack:
        on_round("starting the stores")
        systems: dict[str, Reads] = {}
        for mode in ("one by one", f"{CHUNKS} at once"):
            systems[f"memcpy, {mode}"] = Memcpy().read
        manta = stack.enter_context(manta_reads())
        systems["manta, one by one"], systems[f"manta, {CHUNKS} at once"] = manta
        missing = peers.INSTALL
        if peers.python_with("mooncake") is not None:
            try:
                theirs = stack.enter_context(mooncake_reads())
            except ChildError as error:
                missing = f"does not start here: {str(error).splitlines()[-1]}"
            else:
                systems["mooncake, one by one"], systems[f"mooncake, {CHUNKS} at once"] = theirs
        for read in systems.values():
            read()
        found = interleaved(systems, rounds, lambda number, system: on_round(f"round {number + 1}, {system}"))
    for mode in ("one by one", f"{CHUNKS} at once"):
        ours, memcpy = found[f"manta, {mode}"], found[f"memcpy, {mode}"]
        floor = paired_ratio(ours, memcpy)
        against = f"memcpy and the same check: {_ms(memcpy):.3g} ms; {floor.mean:.1f} x that"
        report.add(f"{name}, {mode}", _ms(ours), "ms", against)
        figure = f"{name}, {mode}: {MOONCAKE}, beside ours"
        theirs_s = found.get(f"mooncake, {mode}")
        target = f"> {FASTER:g} x" if mode == "one by one" else ""
        if theirs_s is None:
            report.skipped(figure, "x", f"{MOONCAKE}: {missing}", target)
            continue
        ratio = paired_ratio(theirs_s, ours)
        detail = f"{MOONCAKE}: {_ms(theirs_s):.3g} ms; 95 % interval {ratio.low:.2f} to {ratio.high:.2f}"
        report.add(figure, ratio.mean, "x", detail, target, ratio.low > FASTER if target else None)


def _ms(seconds: list[float]) -> float:
    return statistics.fmean(seconds) * 1e3


class Memcpy:
    """What a copy and the check cost without anything around them."""

    def __init__(self) -> None:
        self._sources = [np.frombuffer(payload(number), np.uint8) for number in range(CHUNKS)]
        self._sums = [checksum(source.data) for source in self._sources]
        self._targets = [np.zeros(CHUNK_BYTES, np.uint8) for _ in range(CHUNKS)]

    def read(self) -> float:
        for target in self._targets:
            target[:] = 0
        began = time.perf_counter()
        for source, target, asked in zip(self._sources, self._targets, self._sums, strict=True):
            np.copyto(target, source)
            if checksum(target.data) != asked:
                raise RuntimeError("a copy differs")
        return (time.perf_counter() - began) / CHUNKS


@contextmanager
def manta_reads() -> Iterator[tuple[Reads, Reads]]:
    """One by one, and all at once: the client that engines use, and a real cache actor on Ray."""
    config = {"share": "on", "dram": {"mib": 4 * CHUNKS * CHUNK_BYTES >> 20}}
    with cache_nodes([config]) as (node,), node.client(CHUNKS, CHUNK_BYTES) as client:
        keys = [key_of(number) for number in range(CHUNKS)]
        for number, key in enumerate(keys):
            save(client, key, payload(number))
        yield lambda: read_one_by_one(client, keys) / CHUNKS, lambda: read_at_once(client, keys) / CHUNKS


def read_one_by_one(client: StoreClient, keys: list[ChunkKey]) -> float:
    """Seconds until all are there and verified."""
    began = time.perf_counter()
    for key in keys:
        slot = take(client)
        check(key, client.load(key, slot, LIMIT_S).result(LIMIT_S), slot)
        slot.release()
    return time.perf_counter() - began


def read_at_once(client: StoreClient, keys: list[ChunkKey]) -> float:
    """As `read_one_by_one`; the client needs a slot for each key."""
    slots = [take(client) for _ in keys]
    began = time.perf_counter()
    loads = [client.load(key, slot, LIMIT_S) for key, slot in zip(keys, slots, strict=True)]
    for key, load, slot in zip(keys, loads, slots, strict=True):
        check(key, load.result(LIMIT_S), slot)
    seconds = time.perf_counter() - began
    for slot in slots:
        slot.release()
    return seconds


def take(client: StoreClient) -> Slot:
    slot = client.take_slot()
    if slot is None:
        raise RuntimeError("no free slot")
    return slot


def check(key: ChunkKey, loaded: Loaded, slot: Slot) -> None:
    """As the connector does it. Raises ChunkError, or RuntimeError for a chunk that did not come."""
    if loaded.header is None:
        raise RuntimeError(f"a chunk did not come: {loaded.outcome}")
    with slot.view[: loaded.header.nbytes] as view:
        verify(loaded.header, view, key=key, identity=IDENTITY, rank=0, world_size=1)


@contextmanager
def mooncake_reads() -> Iterator[tuple[Reads, Reads]]:
    from cluster.ray_cluster import free_ports

    python = peers.python_with("mooncake")
    command = [str(python), "-m", "benchmarks.mooncake", *map(str, free_ports(3))]
    with LineProcess(command) as process:
        process.wait_ready(90.0)

        def one_by_one() -> float:
            return statistics.fmean(process.ask("each", LIMIT_S))

        def at_once() -> float:
            (seconds,) = process.ask("all", LIMIT_S)
            return float(seconds) / CHUNKS

        yield one_by_one, at_once
