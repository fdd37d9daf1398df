"""Mooncake's store on loopback TCP, one process per part as it would be deployed. Run with the peers' Python.

    python -m benchmarks.mooncake RPC_PORT HTTP_PORT METRICS_PORT

This process is the reader; a child owns the values. It prints `ready`, then answers every line on its standard input
with one line: the seconds of each of CHUNKS reads, one after the other, into registered memory, checksum included;
the line `"all"` is answered with the seconds of one batch of all.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.store_workload import CHUNK_BYTES, CHUNKS, payload

HOST = "127.0.0.1"
ROOM = 256 * 1024 * 1024
START_TIMEOUT_S = 30.0


def main() -> None:
    rpc, http, metrics = map(int, sys.argv[1:4])
    os.environ["MC_TCP_BIND_ADDRESS"] = HOST
    master = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("mooncake_master")),
            f"-rpc_port={rpc}", f"-rpc_address={HOST}", "-enable_http_metadata_server=true",
            f"-http_metadata_server_host={HOST}", f"-http_metadata_server_port={http}",
            f"-metrics_host={HOST}", f"-metrics_port={metrics}",
        ],
        stdin=subprocess.DEVNULL, stdout=sys.stderr,
    )  # fmt: skip
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    owner = spawn.Process(target=own, args=(rpc, http, there), daemon=True)
    failed = 0
    try:
        owner.start()
        if not here.poll(START_TIMEOUT_S) or here.recv() != "stored":
            raise RuntimeError("Mooncake's owner stored nothing")
        serve(connected(rpc, http, 0))
    except Exception:
        traceback.print_exc()
        failed = 1
    finally:
        owner.terminate()
        owner.join(10)
        master.terminate()
        with suppress(subprocess.TimeoutExpired):
            master.wait(10)
        if master.poll() is None:
            master.kill()
        # Its threads do not end by themselves.
        os._exit(failed)


def own(rpc: int, http: int, reader: Connection) -> None:
    store = connected(rpc, http, ROOM)
    for number in range(CHUNKS):
        _check(store.put(name(number), payload(number)), "put")
    reader.send("stored")
    with suppress(EOFError):
        reader.recv()


def connected(rpc: int, http: int, segment: int) -> Any:
    from mooncake.store import MooncakeDistributedStore

    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        store = MooncakeDistributedStore()
        metadata = f"http://{HOST}:{http}/metadata"
        failed = store.setup(HOST, metadata, segment, ROOM // 2, "tcp", "", f"{HOST}:{rpc}")
        if not failed:
            return store
        if time.monotonic() > deadline:
            raise RuntimeError(f"Mooncake's setup: {failed}")
        time.sleep(0.2)


def serve(store: Any) -> None:
    import numpy as np
    import xxhash

    # What a protocol line would be lost in: Mooncake writes its log to standard output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    area: Any = np.zeros(CHUNKS * CHUNK_BYTES, np.uint8)
    _check(store.register_buffer(area.ctypes.data, area.nbytes), "register_buffer")
    slots = [area[n * CHUNK_BYTES : (n + 1) * CHUNK_BYTES] for n in range(CHUNKS)]
    sums = [xxhash.xxh3_128_digest(payload(number)) for number in range(CHUNKS)]
    names = [name(number) for number in range(CHUNKS)]

    def read(number: int) -> float:
        began = time.perf_counter()
        got = store.get_into(names[number], slots[number].ctypes.data, CHUNK_BYTES)
        verified = got == CHUNK_BYTES and xxhash.xxh3_128_digest(slots[number]) == sums[number]
        seconds = time.perf_counter() - began
        _check(0 if verified else -1, "get_into")
        return seconds

    def read_all() -> float:
        began = time.perf_counter()
        got = store.batch_get_into(names, [slot.ctypes.data for slot in slots], [CHUNK_BYTES] * CHUNKS)
        verified = all(xxhash.xxh3_128_digest(slot) == asked for slot, asked in zip(slots, sums, strict=True))
        seconds = time.perf_counter() - began
        _check(0 if verified and set(got) == {CHUNK_BYTES} else -1, "batch_get_into")
        return seconds

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        area[:] = 0
        seconds = [read_all()] if json.loads(line) == "all" else [read(number) for number in range(CHUNKS)]
        print(json.dumps(seconds), file=answers, flush=True)


def name(number: int) -> str:
    return f"chunk-{number}"


def _check(failed: int, call: str) -> None:
    if failed:
        raise RuntimeError(f"Mooncake's {call}: {failed}")


if __name__ == "__main__":
    main()
