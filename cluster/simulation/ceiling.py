"""What a cache without bounds would find: no policy, no store and no cluster can hit more."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from cluster.simulation.workload import Request, Workload


def all_requests(workload: Workload) -> Iterator[Request]:
    """Those that follow from answers included, as if every answer were there at once."""
    coming: list[tuple[float, int, Request]] = []
    arrivals, count = workload.arrivals(), 0
    following = next(arrivals, None)
    while coming or following is not None:
        if following is not None and (not coming or following.at_s <= coming[0][0]):
            request, following = following, next(arrivals, None)
        else:
            request = heapq.heappop(coming)[2]
        yield request
        more = workload.follow_up(request, request.at_s)
        if more is not None:
            count += 1
            heapq.heappush(coming, (more.at_s, count, more))


def ceiling(requests: Iterable[Request], chunk_tokens: int) -> float:
    """Part of the prompt tokens that were there before, when every request finds all chunks of those before it."""
    seen: set[int] = set()
    hit = asked = 0
    for request in requests:
        found = 0
        for block in request.blocks:
            if block not in seen:
                break
            found += 1
        # The last token is computed to have something to sample from, and with it its whole chunk.
        if found * chunk_tokens >= request.prompt_tokens:
            found -= 1
        hit += found * chunk_tokens
        asked += request.prompt_tokens
        seen.update(request.blocks)
        seen.update(request.answer_blocks)
    return hit / asked if asked else 0.0
