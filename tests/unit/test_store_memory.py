"""What a node's store costs in memory for every chunk that it knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHUNKS = 500_000
"""Half a million fill hash tables, which double, as far as a million do."""
PROGRAM = f"""
import asyncio, gc, hashlib
from cache_store.chunk_path import Stored
from cache_store.events import ChunkKey
from tests.store_rig import IDENTITY, MemoryFiles, Rig

class Listed(MemoryFiles):
    def scan(self):
        return [
            Stored(IDENTITY, ChunkKey(hashlib.sha256(b"%d" % i).digest()), 0, 1, 1 << 22, 1 << 22, 1e9 + i, 0.1, "t")
            for i in range(CHUNKS)
        ]

def resident():
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))

async def main(chunks):
    global CHUNKS
    rig = Rig(disk=Listed(), disk_config={{"timeout_s": 300.0}})
    CHUNKS = 1000
    await rig.store.start()
    await rig.store.settle()
    before = resident()
    CHUNKS = chunks
    rig = Rig(disk=Listed(), disk_config={{"timeout_s": 300.0}})
    await rig.store.start()
    await rig.store.settle()
    assert rig.store.stats().tiers["disk"].chunks == chunks
    return (resident() - before) / chunks

print(asyncio.run(main({CHUNKS})))
"""


def test_a_chunk_on_disk_costs_less_than_400_bytes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert 100 < float(done.stdout) < 400
