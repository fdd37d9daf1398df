"""Dynamo's RadixTree on the workload of `index_workload`: run by the peers' Python, prints one JSON object.

    .venv-bench/bin/python -m benchmarks.dynamo_index REPEATS SEQUENCES

Times are medians in microseconds. Nothing but that environment's packages and plain Python may be imported here.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo._core import RadixTree, compute_block_hash_for_seq

from benchmarks.index_workload import BLOCK_TOKENS, CHUNK_TOKENS, MEMORY_CHUNKS, REPLICAS, workload


def main() -> None:
    repeats, sequences = int(sys.argv[1]), int(sys.argv[2])
    found: dict[str, float] = {"bytes_per_block": bytes_per_block()}
    for tokens in (BLOCK_TOKENS, CHUNK_TOKENS):
        found |= {f"{name}_{tokens}": value for name, value in measure(tokens, repeats, sequences).items()}
    print(json.dumps(found))


def measure(block_tokens: int, repeats: int, sequences: int) -> dict[str, float]:
    work = workload(sequences)
    tree = RadixTree()
    for number, sequence in enumerate(work.background):
        store(tree, number % REPLICAS, compute_block_hash_for_seq(sequence, block_tokens), number)
    for replica in range(REPLICAS):
        # Equal content has equal ids on every replica, as its own event stream would say.
        store(tree, replica, compute_block_hash_for_seq(work.held(replica), block_tokens), -1)
    hashes = compute_block_hash_for_seq(work.prompt, block_tokens)
    scores = tree.find_matches(hashes).scores
    assert max(scores.values()) == len(hashes), "the whole prompt is held by one replica"
    assert len(scores) == REPLICAS, scores
    return {
        "lookup": median_us(lambda: tree.find_matches(hashes), repeats),
        "hash": median_us(lambda: compute_block_hash_for_seq(work.prompt, block_tokens), repeats),
    }


def store(tree: Any, worker: int, hashes: list[int], sequence: int) -> None:
    """`sequence` makes the ids of a sequence's blocks distinct from those of others."""
    first = (sequence + 1) << 24
    blocks = [{"block_hash": first + index, "tokens_hash": each} for index, each in enumerate(hashes)]
    stored = {"parent_hash": None, "blocks": blocks}
    tree.apply_event(worker, json.dumps({"event_id": first + worker, "data": {"stored": stored}}).encode())


def bytes_per_block() -> float:
    """By the process's resident memory, which the tree's own thread allocates from too."""
    blocks = 64
    hashes = [
        [(number << 16) + index for index in range(blocks)] for number in range(MEMORY_CHUNKS // blocks)
    ]
    tree = RadixTree()
    store(tree, 0, hashes[0], 0)
    tree.find_matches(hashes[0])
    before = resident()
    for replica in range(REPLICAS):
        for number, sequence in enumerate(hashes):
            store(tree, replica, sequence, number)
    assert len(tree.find_matches(hashes[-1]).scores) == REPLICAS  # all events have been applied
    return (resident() - before) / MEMORY_CHUNKS


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def median_us(work: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 3):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[3:]) * 1e6


if __name__ == "__main__":
    main()
