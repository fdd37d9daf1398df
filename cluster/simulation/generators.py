"""Loads that are made: groups that share a prefix, and sessions of agents whose every turn carries all before it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from cluster.simulation.config import AgenticLoad, SharedPrefixLoad
from cluster.simulation.workload import Request, Workload

_GROUP, _OWN = 1 << 40, 1 << 41
"""Where the names of blocks begin that a group shares, and of those that one request or session has alone."""


class SharedPrefix(Workload):
    """Users of a group ask with the group's prefix and something of their own behind it, at Poisson times."""

    def __init__(self, load: SharedPrefixLoad, chunk_tokens: int, seed: int) -> None:
        self._load, self._chunk, self._seed = load, chunk_tokens, seed
        self.requests = load.requests

    def arrivals(self) -> Iterator[Request]:
        load, draw, at = self._load, random.Random(self._seed), 0.0
        prompt = load.prefix_tokens + load.suffix_tokens
        shared, full = load.prefix_tokens // self._chunk, prompt // self._chunk
        # Every user asks once before anyone asks again, in an order that is drawn anew each time.
        order: list[int] = []
        for number in range(load.requests):
            if not order:
                order = list(range(load.groups * load.users))
                draw.shuffle(order)
            user = order.pop()
            group = _GROUP + user // load.users * shared
            own = _OWN + number * full
            blocks = [*range(group, group + shared), *range(own, own + full - shared)]
            at += draw.expovariate(load.rate)
            yield Request(at, prompt, load.output_tokens, blocks)


class Agentic(Workload):
    """A turn's prompt is the last one's, its answer, and something new; it comes after a pause for thought."""

    def __init__(self, load: AgenticLoad, chunk_tokens: int, seed: int) -> None:
        self._load, self._chunk, self._seed = load, chunk_tokens, seed
        self.requests = load.sessions * load.turns
        longest = self._prompt(load.turns - 1) + load.output_tokens
        self._room = longest // chunk_tokens + 1

    def arrivals(self) -> Iterator[Request]:
        for session in range(1, self._load.sessions + 1):
            yield self._request(self._load.ramp_s * (session - 1) / self._load.sessions, session, 0)

    def follow_up(self, request: Request, ended_s: float) -> Request | None:
        if request.turn + 1 >= self._load.turns:
            return None
        # A seed of integers alone: hashes of text differ from process to process.
        draw = random.Random((self._seed * 1_000_003 + request.session) * 10_007 + request.turn)
        pause = draw.expovariate(1 / self._load.think_s) if self._load.think_s else 0.0
        return self._request(ended_s + pause, request.session, request.turn + 1)

    def _request(self, at_s: float, session: int, turn: int) -> Request:
        prompt = self._prompt(turn)
        blocks = self._blocks(session, prompt + self._load.output_tokens)
        filled = prompt // self._chunk
        return Request(
            at_s, prompt, self._load.output_tokens, blocks[:filled], blocks[filled:], session, turn
        )

    def _prompt(self, turn: int) -> int:
        load = self._load
        return load.common_tokens + load.first_tokens + turn * (load.output_tokens + load.turn_tokens)

    def _blocks(self, session: int, tokens: int) -> Sequence[int]:
        common, full = self._load.common_tokens // self._chunk, tokens // self._chunk
        own = _OWN + session * self._room
        return [*range(_GROUP, _GROUP + min(common, full)), *range(own, own + max(0, full - common))]


def made(load: SharedPrefixLoad | AgenticLoad, chunk_tokens: int, seed: int) -> Workload:
    if isinstance(load, SharedPrefixLoad):
        return SharedPrefix(load, chunk_tokens, seed)
    return Agentic(load, chunk_tokens, seed)
