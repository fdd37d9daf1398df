"""A cluster in simulated time, behind the real index and ledger, for tests of policies."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from cache_store.events import ChunkKey
from router.candidates import Candidate, Candidates
from router.index import PrefixIndex
from router.ledger import Ledger
from router.policies import Policy, RouteRequest
from router.speed import PRIOR, Speed

CHUNK_TOKENS = 256
PREFILL_TOKENS_PER_S = 20_000.0
SPEED = Speed.from_named(
    PRIOR.named() | {"prefill_overhead_s": 0.0, "prefill_token_s": 1 / PREFILL_TOKENS_PER_S}
)
REPLICAS = tuple(f"replica-{number}" for number in range(8))


def chunk_keys(labels: Sequence[str]) -> list[ChunkKey]:
    """Keys of a prompt whose chunks are named by labels: a chain, as real keys are."""
    keys, parent = [], b""
    for label in labels:
        parent = blake3(parent + label.encode()).digest()
        keys.append(ChunkKey(parent))
    return keys


@dataclass(frozen=True)
class Prompt:
    id: str
    labels: tuple[str, ...]
    tail_tokens: int = 0

    @property
    def tokens(self) -> int:
        return CHUNK_TOKENS * len(self.labels) + self.tail_tokens


class SimulatedCluster:
    """Replicas that prefill in turn and decode side by side, behind the real index and ledger.

    Time is simulated: events are taken in order, so a run is a function of its arguments.
    """

    def __init__(self, policy: Policy, replicas: Sequence[str] = REPLICAS) -> None:
        self.policy = policy
        self.index = PrefixIndex()
        self.ledger = Ledger()
        self.now = 0.0
        self.chosen: dict[str, str] = {}
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._busy_until = dict.fromkeys(replicas, 0.0)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def run(self) -> None:
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.index.check_integrity()
        self.ledger.check_integrity()
        assert self.ledger.open_requests() == 0

    def send(self, prompt: Prompt, decode_s: float, then: Callable[[], None] = lambda: None) -> None:
        keys = chunk_keys(prompt.labels)
        match = self.index.match(keys)
        rows = []
        for replica, busy_until in self._busy_until.items():
            own = self.ledger.load(replica)
            left = max(0.0, busy_until - self.now) * PREFILL_TOKENS_PER_S
            rows.append(
                Candidate(
                    replica,
                    matched=CHUNK_TOKENS * match.leading(replica),
                    pending=min(own.prefill_tokens, round(left)),
                    waiting=own.prefilling,
                    running=own.running,
                    last_chosen=own.last_chosen,
                    speed=SPEED.named(),
                )
            )
        choice = self.policy.choose(RouteRequest(prompt.id, prompt.tokens), Candidates.of(rows))
        assert choice is not None
        replica, missing = choice.replica, prompt.tokens - choice.matched_tokens
        self.chosen[prompt.id] = replica
        self.prompt_tokens += prompt.tokens
        self.cached_tokens += choice.matched_tokens
        reservation = self.ledger.reserve(replica, prompt.id, missing)

        def first_token() -> None:
            self.index.apply(replica, "hbm", added=keys)
            reservation.first_token()

        def end() -> None:
            reservation.release()
            then()

        prefilled = max(self.now, self._busy_until[replica]) + missing / PREFILL_TOKENS_PER_S
        self._busy_until[replica] = prefilled
        self.at(prefilled, first_token)
        self.at(prefilled + decode_s, end)

    def busiest_over_mean(self) -> float:
        counts = Counter(self.chosen.values())
        return max(counts.values()) * len(self._busy_until) / len(self.chosen)


def closed_loop(
    cluster: SimulatedCluster, prompts: Sequence[Prompt], clients: int, decode_s: Callable[[], float]
) -> None:
    """Each client sends its next prompt when its last one is answered."""
    remaining = iter(prompts)

    def send_next() -> None:
        prompt = next(remaining, None)
        if prompt is not None:
            cluster.send(prompt, decode_s(), send_next)

    for client in range(clients):
        cluster.at(client * 0.001, send_next)
    cluster.run()
