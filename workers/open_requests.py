"""What is open at a replica, through which router it came, and what of the prompts is still to be computed.

A router has to know what the others have sent to a replica. It can't find out by subtracting what it has sent itself
from what the replica reports in all: some of that may be on its way. So each request names its router and reservation,
and the replica tells every router's part.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import NamedTuple

from cache_store.events import MAX_SHARES, Share
from workers.messages import ReservationName


class Counts(NamedTuple):
    """A moment of it."""

    requests: int
    prefilling: int
    """Of `requests`, those without a first token."""
    prefill_tokens: int
    """Prompt tokens still to be computed."""
    shares: tuple[Share, ...]
    """Parts by router; see `cache_store.events.Load.shares`."""


class _Sum:
    """Of one router's open requests."""

    __slots__ = ("prefill_tokens", "prefilling", "requests", "seen")

    def __init__(self) -> None:
        self.seen = self.requests = self.prefilling = self.prefill_tokens = 0


class OpenRequest:
    """One request. Call order: `begin_prefill` once per sequence, `end_prefill` with the first output of each, `close`.

    An engine may leave out all but the last, and may call the others late: then they change nothing.
    """

    __slots__ = ("_account", "_expected", "_sequences", "closed", "prefilling", "router", "tokens")

    def __init__(self, account: OpenRequests, router: str, tokens: int, expected: bool) -> None:
        self.router = router
        """Empty for a request that came past them."""
        self.tokens = tokens
        """Prompt tokens still to be computed, whatever the one that is under way has got done."""
        self.prefilling = True
        self.closed = False
        self._account = account
        self._expected = expected
        self._sequences = 0

    def begin_prefill(self, tokens: int, measured: bool) -> None:
        """A sequence waits for its prefill. `measured`: the engine has looked how much it will compute; otherwise that
        is the whole prompt, and what a router expected is the better guess."""
        if not self.prefilling:
            return
        self._sequences += 1
        if measured or not self._expected:
            self._account.count_tokens(self, tokens if self._sequences == 1 else self.tokens + tokens)

    def end_prefill(self, computed: int) -> None:
        """A sequence has its first output, for which so many prompt tokens were computed."""
        if not self.prefilling:
            return
        self._sequences -= 1
        if self._sequences > 0:
            self._account.count_tokens(self, max(0, self.tokens - computed))
        else:
            self._account.end_prefill(self)

    def close(self) -> None:
        """Safe to call twice."""
        if not self.closed:
            self.closed = True
            self._account.remove(self)


class OpenRequests:
    """The account. Lives on the replica's event loop."""

    def __init__(
        self, on_change: Callable[[], None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`on_change` follows every request that comes, gets its first output or ends."""
        self._on_change = on_change
        self._clock = clock
        self._sums: dict[str, _Sum] = {}
        self._open: set[OpenRequest] = set()
        self._prefilling: dict[OpenRequest, None] = {}
        """In order of arrival, which is how engines take them."""
        self._head_since = 0.0
        """When the first of them became the first."""

    def __len__(self) -> int:
        return len(self._open)

    def open(self, name: ReservationName | None = None) -> OpenRequest:
        """Count a request; `name` is the reservation that it came with."""
        router, number, tokens = name or ReservationName("", 0, 0)
        request = OpenRequest(self, router, tokens, expected=name is not None)
        of_router = self._sums.setdefault(router, _Sum())
        of_router.seen = max(of_router.seen, number)
        of_router.requests += 1
        of_router.prefilling += 1
        of_router.prefill_tokens += tokens
        self._open.add(request)
        if not self._prefilling:
            self._head_since = self._clock()
        self._prefilling[request] = None
        self._on_change()
        return request

    def count_tokens(self, request: OpenRequest, tokens: int) -> None:
        """It has so many left to compute."""
        self._sums[request.router].prefill_tokens += tokens - request.tokens
        request.tokens = tokens
        self._on_change()

    def end_prefill(self, request: OpenRequest) -> None:
        if next(iter(self._prefilling)) is request:
            self._head_since = self._clock()
        del self._prefilling[request]
        of_router = self._sums[request.router]
        of_router.prefilling -= 1
        of_router.prefill_tokens -= request.tokens
        request.prefilling, request.tokens = False, 0
        self._on_change()

    def remove(self, request: OpenRequest) -> None:
        if request.prefilling:
            self.end_prefill(request)
        self._open.discard(request)
        of_router = self._sums[request.router]
        of_router.requests -= 1
        if not of_router.requests:
            del self._sums[request.router]
        self._on_change()

    def counts(self, prefill_rate: float = 0.0) -> Counts:
        """`prefill_rate`: tokens that the engine computes per second; 0 for unknown. What the prompt under way has got
        done by now is estimated from it."""
        head = next(iter(self._prefilling), None)
        done = 0 if head is None else self._done(head, prefill_rate)
        shares = [
            Share(
                router,
                each.seen,
                each.requests,
                each.prefilling,
                each.prefill_tokens - (done if head is not None and head.router == router else 0),
            )
            for router, each in self._sums.items()
            if router
        ]
        if len(shares) > MAX_SHARES:
            shares = heapq.nlargest(MAX_SHARES, shares, key=lambda share: share.requests)
        tokens = sum(each.prefill_tokens for each in self._sums.values()) - done
        return Counts(len(self._open), len(self._prefilling), tokens, tuple(shares))

    def _done(self, head: OpenRequest, prefill_rate: float) -> int:
        return min(head.tokens, int((self._clock() - self._head_since) * prefill_rate))

    def check_integrity(self) -> None:
        """Raises AssertionError when a router's sums are not those over its open requests."""
        assert set(self._prefilling) == {request for request in self._open if request.prefilling}
        assert set(self._sums) == {request.router for request in self._open}
        for router, each in self._sums.items():
            own = [request for request in self._open if request.router == router]
            assert not any(request.closed for request in own)
            assert each.requests == len(own)
            assert each.prefilling == sum(request.prefilling for request in own)
            assert each.prefill_tokens == sum(request.tokens for request in own)
            assert all(request.tokens >= 0 for request in own)
