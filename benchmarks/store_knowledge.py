"""What a million known chunks cost the actor, and how long it looks for some of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable

from benchmarks import peers
from benchmarks.harness import Report
from benchmarks.known_chunks import KEYS

BYTES_PER_CHUNK = 400.0
LOOKUP_US = 200.0
LIMIT_S = 300.0
REPEATS = 2000


def knowledge_figures(report: Report, chunks: int, on_round: Callable[[str], None]) -> None:
    on_round(f"{chunks:,} chunks")
    name = f"memory per chunk at {chunks:,} known"
    lookups = {}
    for how, what in (("written", "as they come"), ("listed", "listed at the start")):
        on_round(f"{chunks:,} chunks, {how}")
        found = lookups[how] = measured(chunks, REPEATS, how)
        traced = measured(chunks, 0, how, "traced")
        against = f"allocated: {traced['bytes_per_chunk']:.0f} bytes; the rest is between allocations"
        report.at_most(
            f"{name}, {what}, resident", found["bytes_per_chunk"], "bytes", BYTES_PER_CHUNK, against
        )
    p50, p99 = lookups["written"]["p50_us"], lookups["written"]["p99_us"]
    report.at_most(
        f"lookup of {KEYS} keys among {chunks:,}, median", p50, "µs", LOOKUP_US, f"p99: {p99:.0f} µs"
    )


def measured(chunks: int, repeats: int, *words: str) -> dict[str, float]:
    """Of `benchmarks.known_chunks`, in a process that has done nothing before."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.known_chunks", str(chunks), str(repeats), *words],
        cwd=peers.ROOT, env=os.environ | {"PYTHONPATH": str(peers.ROOT)}, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"benchmarks.known_chunks ended with {done.returncode}:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout)
    return found
