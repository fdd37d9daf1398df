"""Sessions of requests, from a workload and a seed. Pure: the same arguments give the same sessions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

from cluster.bench.config import MAX_REQUESTS, MultiTurn, RandomLengths, SharedPrefix, TraceReplay, Workload
from cluster.bench.prompts import Span
from cluster.bench.trace import read_trace, replay


class Turn(NamedTuple):
    """One request, as what it adds to the session's history."""

    spans: tuple[Span, ...]
    output_tokens: int
    think_s: float = 0.0
    """Pause between the answer before and this request."""


class Session(NamedTuple):
    """Requests of which each waits for the answer to the one before it and carries all of them."""

    name: str
    turns: tuple[Turn, ...]
    system: Span | None = None
    """What stands before the first turn."""
    start_s: float | None = None
    """When the trace started it, from the trace's start."""


def natural_size(workload: Workload) -> int | None:
    """Requests of the whole workload; None where only the caller's bounds or the trace's end say it."""
    if workload.kind == "multi-turn":
        return workload.conversations * workload.turns
    if workload.kind == "shared-prefix":
        return workload.groups * workload.users
    return 100 if workload.kind == "random" else None


def planned_requests(workload: Workload, num_requests: int | None, duration_s: float | None) -> int | None:
    """How many requests a run is bounded by; None for the end of the trace or of the time."""
    if num_requests is not None:
        return num_requests
    return None if duration_s is not None else natural_size(workload)


def sessions(workload: Workload, seed: int, requests: int | None = None) -> Iterator[Session]:
    """The workload's sessions, in the order in which they start, cut after `requests` requests.

    Without a number a trace ends where it ends, and others go on with further conversations or rounds of users.
    Raises TraceError.
    """
    left = MAX_REQUESTS if requests is None else requests
    for session in _endless(workload, seed):
        if left <= 0:
            return
        yield session if len(session.turns) <= left else session._replace(turns=session.turns[:left])
        left -= len(session.turns)


def _endless(workload: Workload, seed: int) -> Iterator[Session]:
    match workload:
        case MultiTurn():
            return (_conversation(workload, seed, number) for number in itertools.count())
        case SharedPrefix():
            return _shared_prefix(workload, seed)
        case RandomLengths():
            return _random_lengths(workload, seed)
        case TraceReplay():
            return _trace(workload)


def _conversation(workload: MultiTurn, seed: int, number: int) -> Session:
    source = random.Random(f"{seed}/think/{number}")
    turns = tuple(
        Turn(
            (Span(f"conversation/{number}/{turn}", workload.input_tokens),),
            workload.output_tokens,
            source.expovariate(1 / workload.think_s) if turn and workload.think_s else 0.0,
        )
        for turn in range(workload.turns)
    )
    system = Span("system", workload.system_tokens) if workload.system_tokens else None
    return Session(f"conversation-{number}", turns, system)


def _shared_prefix(workload: SharedPrefix, seed: int) -> Iterator[Session]:
    """Round by round every user once, in an order drawn anew."""
    members = [(group, user) for group in range(workload.groups) for user in range(workload.users)]
    for number in itertools.count():
        random.Random(f"{seed}/order/{number}").shuffle(members)
        for group, user in members:
            spans = (
                Span(f"group/{group}", workload.prefix_tokens),
                Span(f"group/{group}/user/{user}/{number}", workload.suffix_tokens),
            )
            yield Session(f"group-{group}-user-{user}", (Turn(spans, workload.output_tokens),))


def _random_lengths(workload: RandomLengths, seed: int) -> Iterator[Session]:
    source = random.Random(f"{seed}/lengths")

    def length(mean: int) -> int:
        spread = int(mean * workload.range_ratio)
        return max(1, source.randint(mean - spread, mean + spread))

    for number in itertools.count():
        span = Span(f"random/{number}", length(workload.input_tokens))
        yield Session(f"request-{number}", (Turn((span,), length(workload.output_tokens)),))


def _trace(workload: TraceReplay) -> Iterator[Session]:
    # Read whole, so that a bad row is found before anything is sent.
    rows = list(
        itertools.islice(read_trace(workload.path), min(workload.limit or MAX_REQUESTS, MAX_REQUESTS))
    )
    for number, request in enumerate(
        replay(rows, workload.time_scale, workload.length_scale, workload.max_input_tokens)
    ):
        turn = Turn(request.spans, request.output_tokens)
        yield Session(f"request-{number}", (turn,), start_s=request.start_s)
