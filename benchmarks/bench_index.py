"""`make bench-index`: the prefix index, chunk hashing and the decision, beside Dynamo's and Ray's indexes."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tracemalloc
from array import array
from typing import Any

from benchmarks import decision_state, peers, ray_tree
from benchmarks.harness import Report, percentile, terminal, timed
from benchmarks.index_workload import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    MEMORY_CHUNKS,
    PROMPT_TOKENS,
    REPLICAS,
    SEQUENCE_TOKENS,
    SEQUENCES,
    Workload,
    workload,
)
from cache_store.events import ChunkKey
from cache_store.keys import chunk_keys, namespace
from router.decision_log import Measured
from router.index import PrefixIndex

LOOKUP_US = 54.0
HASH_US = 200.0
BYTES_PER_CHUNK = 300.0
DECISION_TOKENS = 100_000
DECISION_P50_MS = 2.0
DECISION_P95_MS = 5.0
DYNAMO = "Dynamo RadixTree"
RAY = "Ray PrefixTree"
_PEER_TIMEOUT_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_index", description=__doc__)
    parser.add_argument("--repeats", type=int, default=300, help="calls whose median is taken")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, help="sequences in the index")
    parser.add_argument("--decisions", type=int, default=200, help="decisions per number of replicas")
    options = parser.parse_args()
    report, console = Report("index"), terminal()
    work = workload(options.sequences)
    with console.status("Dynamo's index"):
        dynamo = dynamo_figures(options.repeats, options.sequences)
    with console.status("the index"):
        index_figures(report, work, options.repeats, dynamo)
        memory_figures(report, dynamo)
    with console.status("Ray's index"):
        ray_figures(report, work, options.repeats)
    for replicas in (8, 64):
        with console.status(f"decisions among {replicas} replicas"):
            decision_figures(report, replicas, options.decisions, options.sequences)
    return report.finish(console)


def index_figures(report: Report, work: Workload, repeats: int, dynamo: dict[str, float]) -> None:
    prompt = array("I", work.prompt)
    what = f"of {PROMPT_TOKENS // 1024}k tokens"
    for tokens, limited in ((CHUNK_TOKENS, True), (BLOCK_TOKENS, False)):
        index = filled(work, tokens)
        root = namespace(b"identity" * 4)
        keys = chunk_keys(root, prompt, tokens)
        found = index.match(keys)
        assert [found.leading(replica_id(n)) for n in (0, REPLICAS - 1)] == [len(keys) // REPLICAS, len(keys)]
        lookup = median_us(lambda index=index, keys=keys: index.match(keys), repeats)
        hashing = median_us(lambda root=root, tokens=tokens: chunk_keys(root, prompt, tokens), repeats)
        grain = f"{tokens}-token chunks"
        for verb, value, limit in (("lookup", lookup, LOOKUP_US), ("hash", hashing, HASH_US)):
            name = f"{verb} {what}, {grain}"
            theirs = dynamo.get(f"{verb}_{BLOCK_TOKENS}")
            peer = f"{DYNAMO}, {BLOCK_TOKENS}-token blocks"
            if limited:
                report.at_most(name, value, "µs", limit)
                report.less_than(f"{name}, beside the peer's own grain", value, "µs", peer, theirs)
            else:
                known = f"{peer}: {theirs:.3g} µs" if theirs is not None else f"{peer}: {peers.INSTALL}"
                report.add(name, value, "µs", known)
            if (same := dynamo.get(f"{verb}_{tokens}")) is not None and tokens != BLOCK_TOKENS:
                report.add(f"{verb} {what}, {grain}, {DYNAMO}", same, "µs")


def ray_figures(report: Report, work: Workload, repeats: int) -> None:
    ours = next(f.value for f in report.figures if f.figure.startswith("lookup"))
    assert ours is not None
    name = f"lookup of {PROMPT_TOKENS // 1024}k tokens, {CHUNK_TOKENS}-token chunks, beside Ray's"
    try:
        tree = ray_tree.build(work)
    except ImportError as error:
        report.less_than(name, ours, "µs", f"{RAY} ({error})", None)
        return
    theirs = median_us(tree.lookup, max(10, repeats // 10))
    report.less_than(name, ours, "µs", f"{RAY}, a character a token", theirs)
    report.add(f"insert of one sequence, {RAY}", tree.insert_s * 1e6, "µs")


def memory_figures(report: Report, dynamo: dict[str, float]) -> None:
    used = in_subprocess("bytes_per_chunk()")
    theirs = dynamo.get("bytes_per_block")
    against = f"{DYNAMO}, a block: {theirs:.0f} bytes" if theirs is not None else f"{DYNAMO}: {peers.INSTALL}"
    report.at_most(f"memory per chunk at {REPLICAS} holders", used, "bytes", BYTES_PER_CHUNK, against)


def bytes_per_chunk() -> float:
    """All that the index allocates, keys included, each key coming anew from every holder as from a stream."""
    tracemalloc.start()
    index = PrefixIndex()
    before = tracemalloc.get_traced_memory()[0]
    for replica in range(REPLICAS):
        draw = random.Random(7)
        index.apply(replica_id(replica), "hbm", (ChunkKey(draw.randbytes(32)) for _ in range(MEMORY_CHUNKS)))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    assert index.stats()["hbm"].entries == MEMORY_CHUNKS
    return used / MEMORY_CHUNKS


def decision_figures(report: Report, replicas: int, decisions: int, sequences: int) -> None:
    draw = random.Random(replicas)
    core = decision_state.core_with(replicas, CHUNK_TOKENS)
    decision_state.fill(core, CHUNK_TOKENS, sequences, SEQUENCE_TOKENS, draw)
    prompts = list(decision_state.prompts(core, CHUNK_TOKENS, DECISION_TOKENS, 20, draw))
    numbers = iter(range(10**9))

    def decide() -> None:
        number = next(numbers)
        placed = core.place(decision_state.query(number, prompts[number % len(prompts)]))
        assert placed is not None
        core.release(placed, Measured(200, placed.matched_tokens, None, 0.0))

    seconds = timed(decide, decisions, warmup=len(prompts))
    name = f"prompt of {DECISION_TOKENS // 1000}k tokens to decision, {replicas} replicas"
    report.at_most(f"{name}, p50", percentile(seconds, 0.5) * 1e3, "ms", DECISION_P50_MS)
    report.at_most(f"{name}, p95", percentile(seconds, 0.95) * 1e3, "ms", DECISION_P95_MS)


def filled(work: Workload, chunk_tokens: int) -> PrefixIndex:
    index, root = PrefixIndex(), namespace(b"identity" * 4)
    for number, sequence in enumerate(work.background):
        index.apply(replica_id(number % REPLICAS), "hbm", chunk_keys(root, sequence, chunk_tokens))
    for replica in range(REPLICAS):
        index.apply(replica_id(replica), "hbm", chunk_keys(root, work.held(replica), chunk_tokens))
    return index


def replica_id(number: int) -> str:
    return f"unified-{number:02}"


def dynamo_figures(repeats: int, sequences: int) -> dict[str, float]:
    """Medians of `dynamo_index`; empty where it is not installed."""
    python = peers.python_with("dynamo")
    if python is None:
        return {}
    command = [str(python), "-m", "benchmarks.dynamo_index", str(repeats), str(sequences)]
    return dict(_json_of(command))


def in_subprocess(expression: str) -> float:
    """A value of this module, computed in a process that has done nothing before."""
    code = f"import json; from benchmarks import bench_index as b; print(json.dumps(b.{expression}))"
    return float(_json_of([sys.executable, "-c", code]))


def _json_of(command: list[str]) -> Any:
    environment = os.environ | {"PYTHONPATH": str(peers.ROOT)}
    done = subprocess.run(
        command, cwd=peers.ROOT, env=environment, capture_output=True, text=True, timeout=_PEER_TIMEOUT_S
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def median_us(work: Any, repeats: int) -> float:
    return statistics.median(timed(work, repeats, warmup=3)) * 1e6


if __name__ == "__main__":
    sys.exit(main())
