"""How other routers pick a replica, as rules of a simulation, after what their documentation or source says.

They are given what they would know: Ray's rule the prompts that it routed itself, the hash the prompt's beginning, the
cost rules exact events of what every replica holds, as Manta's own router has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from hashlib import blake2b
from random import Random

import numpy as np

from cache_store.events import ChunkKey
from router.candidates import Candidates, Ints
from router.choice import Choice, RouteRequest
from router.policies.picking import choice_of


class RayPrefixAffinity:
    """Ray Serve LLM 2.60, `PrefixCacheAffinityRouter` with its defaults.

    A tree of the prompts that were routed, from which nothing is ever taken. The replicas with the longest match, where
    that is a tenth of the prompt at least; otherwise those that the tree has least of. Of them the one with fewest open
    requests. Its check for imbalance is off by default; `imbalanced` turns it on.
    """

    MATCH_RATE = 0.1

    def __init__(self, chunk_tokens: int, imbalanced: float = float("inf"), seed: int = 0) -> None:
        self._chunk, self._imbalanced = chunk_tokens, imbalanced
        self._random = Random(seed)
        self._tree: dict[ChunkKey, set[str]] = {}
        self._tokens: dict[str, int] = {}

    def decide(
        self, request: RouteRequest, keys: Sequence[ChunkKey], candidates: Candidates
    ) -> Choice | None:
        usable = candidates.usable()
        if not len(usable):
            return None
        queued = candidates.open_requests[usable]
        if queued.max() - queued.min() > self._imbalanced:
            chosen = np.array(sorted(self._random.sample(range(len(usable)), min(2, len(usable)))))
        else:
            chosen = self._matched(request, keys, candidates, usable)
        # Of all others none is picked, however idle.
        cost = np.full(len(usable), np.inf)
        cost[chosen] = queued[chosen]
        choice = choice_of(request, candidates, usable, cost)
        self._insert(choice.replica, keys)
        return choice

    def _matched(
        self, request: RouteRequest, keys: Sequence[ChunkKey], candidates: Candidates, usable: Ints
    ) -> Ints:
        names = [candidates.ids[row] for row in usable]
        depth = bisect_left(
            range(len(keys)), True, key=lambda at: not self._tree.get(keys[at], set()) & set(names)
        )
        if depth * self._chunk < self.MATCH_RATE * request.prompt_tokens:
            sizes = np.array([self._tokens.get(name, 0) for name in names])
            return np.flatnonzero(sizes == sizes.min())
        holders = self._tree[keys[depth - 1]]
        return np.array([at for at, name in enumerate(names) if name in holders])

    def _insert(self, replica: str, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            holders = self._tree.setdefault(key, set())
            if replica not in holders:
                holders.add(replica)
                self._tokens[replica] = self._tokens.get(replica, 0) + self._chunk


class ConsistentHash:
    """A ring by the prompt's beginning, with bounded load (Mirrokni et al., SODA'18), as gateways do.

    The next replica on the ring that has no more than `bound` times the mean of open requests. The session is hashed
    where there is one, else the first two chunks: the first alone is the same in every request of a trace.
    """

    POINTS = 64

    def __init__(self, bound: float = 1.25, chunks: int = 2) -> None:
        self._bound, self._chunks = bound, chunks
        self._rings: dict[tuple[str, ...], tuple[list[int], list[int]]] = {}

    def decide(
        self, request: RouteRequest, keys: Sequence[ChunkKey], candidates: Candidates
    ) -> Choice | None:
        usable = candidates.usable()
        if not len(usable):
            return None
        points, rows = self._ring(tuple(candidates.ids[row] for row in usable))
        beginning = b"".join(keys[: self._chunks]) or request.request_id.encode()
        start = bisect_left(points, _hash(request.session.encode() or beginning))
        queued = candidates.open_requests[usable]
        most = np.ceil(self._bound * (queued.sum() + 1) / len(usable))
        ring = (rows[(start + step) % len(rows)] for step in range(len(rows)))
        chosen = next(row for row in ring if queued[row] + 1 <= most)
        cost = np.ones(len(usable))
        cost[chosen] = 0.0
        return choice_of(request, candidates, usable, cost)

    def _ring(self, names: tuple[str, ...]) -> tuple[list[int], list[int]]:
        if names not in self._rings:
            points = sorted(
                (_hash(f"{name}/{point}".encode()), row)
                for row, name in enumerate(names)
                for point in range(self.POINTS)
            )
            self._rings[names] = [point for point, _ in points], [row for _, row in points]
        return self._rings[names]


class OverlapPlusLoad:
    """Dynamo's KV router: the fewest of `weight` times the blocks to prefill plus the blocks that decode.

    Blocks to prefill: those pending there and those of this prompt that are missing; blocks in use stand for decoding.
    """

    def __init__(self, blocks: int, chunk_tokens: int, weight: float = 1.0) -> None:
        self._blocks, self._chunk, self._weight = blocks, chunk_tokens, weight

    def decide(
        self, request: RouteRequest, keys: Sequence[ChunkKey], candidates: Candidates
    ) -> Choice | None:
        usable = candidates.usable()
        if not len(usable):
            return None
        missing = request.prompt_tokens - np.minimum(candidates.matched[usable], request.prompt_tokens)
        prefill = (candidates.pending[usable] + missing) / self._chunk
        decode = candidates.kv_used[usable] * self._blocks + request.prompt_tokens / self._chunk
        return choice_of(request, candidates, usable, self._weight * prefill + decode)


class WeightedScores:
    """llm-d's scheduler with its default scorers and weights: prefix 3, queue 2, KV use 2, each from 0 to 1."""

    def decide(
        self, request: RouteRequest, keys: Sequence[ChunkKey], candidates: Candidates
    ) -> Choice | None:
        usable = candidates.usable()
        if not len(usable):
            return None
        prefix = np.minimum(candidates.matched[usable] / max(1, request.prompt_tokens), 1.0)
        waiting = candidates.waiting[usable]
        spread = waiting.max() - waiting.min()
        queue = (waiting.max() - waiting) / spread if spread else np.ones(len(usable))
        score = 3 * prefix + 2 * queue + 2 * (1 - candidates.kv_used[usable])
        return choice_of(request, candidates, usable, -score)


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
