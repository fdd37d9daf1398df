"""What this router has sent to each replica and not seen finished: counted at the moment of decision.

A replica's own load report arrives a fraction of a second late. Until then only the ledger knows of the
requests that were just decided, and it is what makes a burst spread instead of piling onto one idle
replica. Of what has reached the replica, a report tells how much is still to be computed; there the smaller
figure counts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self

from cache_store.events import Share
from workers.messages import ReservationName

State = Literal["prefilling", "running", "released"]


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """What one router has open at one replica."""

    prefill_tokens: int = 0
    """Prompt tokens that requests without a first token have still to compute there, as far as the router knows."""
    prefilling: int = 0
    """Requests without a first token."""
    running: int = 0
    """Requests with a first token that have not ended."""
    last_chosen: int = 0
    """Number of the reservation that was the replica's latest, counted over all replicas; 0 for never."""

    @property
    def open_requests(self) -> int:
        return self.prefilling + self.running


_IDLE = OwnLoad()


class _Account:
    __slots__ = (
        "changed", "last_chosen", "on_its_way", "open", "prefill_tokens", "prefilling", "reported", "running", "seen",
    )  # fmt: skip

    def __init__(self, changed: Callable[[], None]) -> None:
        self.changed = changed
        self.open: set[Reservation] = set()
        self.prefill_tokens = 0
        self.prefilling = 0
        self.running = 0
        self.last_chosen = 0
        self.seen = 0
        """Number of the latest reservation that the replica had seen at its last report."""
        self.on_its_way = 0
        """Of `prefill_tokens`, those of later reservations."""
        self.reported: int | None = None
        """What was left of the others' then; None where the report does not say."""

    @property
    def pending(self) -> int:
        if self.reported is None:
            return self.prefill_tokens
        return self.on_its_way + min(self.reported, self.prefill_tokens - self.on_its_way)

    def count(self, reservation: Reservation, sign: int) -> None:
        """A reservation without a first token comes (1) or is one no more (-1)."""
        self.prefilling += sign
        self.prefill_tokens += sign * reservation.prefill_tokens
        if reservation.number > self.seen:
            self.on_its_way += sign * reservation.prefill_tokens


class Reservation:
    """One request's place at one replica, from the decision to the end of the answer.

    Call order: `first_token` at most once that counts, then `release`. Both may be called again, and after
    the replica was forgotten: then they change nothing. As a context manager it releases on leaving.
    """

    __slots__ = ("_account", "_state", "name", "prefill_tokens", "replica", "request_id")

    def __init__(self, account: _Account, replica: str, request_id: str, name: ReservationName) -> None:
        self.name = name
        """As the replica is told of it."""
        self.replica = replica
        self.request_id = request_id
        self.prefill_tokens = name.prefill_tokens
        self._account = account
        self._state: State = "prefilling"

    @property
    def number(self) -> int:
        """Counted over all replicas, from 1."""
        return self.name.number

    @property
    def state(self) -> State:
        return self._state

    def first_token(self) -> None:
        """The prefill is over: its tokens no longer weigh on the replica."""
        if self._state == "prefilling":
            self._account.count(self, -1)
            self._account.running += 1
            self._state = "running"
            self._account.changed()

    def release(self) -> None:
        """The request has ended, in whatever way."""
        if self._state == "released":
            return
        if self._state == "prefilling":
            self._account.count(self, -1)
        else:
            self._account.running -= 1
        self._account.open.discard(self)
        self._state = "released"
        self._account.changed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Ledger:
    """Open reservations by replica. Not thread-safe; lives on a router's event loop."""

    def __init__(self, router: str = "") -> None:
        """`router` names the ledger's router, 16 hex digits; drawn where not given."""
        self.router = router or secrets.token_hex(8)
        self.changed: set[str] = set()
        """Replicas whose load may be another one since their reader cleared this."""
        self._accounts: dict[str, _Account] = {}
        self._decisions = 0

    def reserve(self, replica: str, request_id: str, prefill_tokens: int) -> Reservation:
        """Count a request that was just decided. `prefill_tokens`: what the replica will have to compute.

        The same request may hold several reservations (a retry elsewhere, several prompts).
        Raises ValueError for a negative number of tokens.
        """
        if prefill_tokens < 0:
            raise ValueError(f"prefill_tokens of {request_id} is {prefill_tokens}; needed: 0 or more")
        account = self._accounts.get(replica)
        if account is None:
            account = self._accounts[replica] = _Account(partial(self.changed.add, replica))
        self._decisions += 1
        name = ReservationName(self.router, self._decisions, prefill_tokens)
        reservation = Reservation(account, replica, request_id, name)
        account.open.add(reservation)
        account.count(reservation, 1)
        account.last_chosen = self._decisions
        account.changed()
        return reservation

    def reported(self, replica: str, share: Share) -> None:
        """What the replica says of this router's requests. `share` is of this router.

        For answers that are not streamed this is the only sign before their end that a prompt was computed.
        """
        self.changed.add(replica)
        account = self._accounts.get(replica)
        if account is None:
            return
        reached = [each for each in account.open if each.number <= share.seen]
        account.seen = share.seen
        account.on_its_way = sum(
            each.prefill_tokens
            for each in account.open
            if each.number > share.seen and each.state == "prefilling"
        )
        if len(reached) > share.requests:
            # Connections overtake each other: some of these are on their way, and nobody knows which.
            account.reported = None
            return
        account.reported = share.prefill_tokens
        if not share.prefilling:
            for each in reached:
                each.first_token()

    def load(self, replica: str) -> OwnLoad:
        """What is open at a replica; all zero for one never chosen."""
        account = self._accounts.get(replica)
        if account is None:
            return _IDLE
        return OwnLoad(account.pending, account.prefilling, account.running, account.last_chosen)

    def open_requests(self) -> int:
        """Over all replicas."""
        return sum(account.prefilling + account.running for account in self._accounts.values())

    def forget(self, replica: str) -> None:
        """The replica is gone: its reservations are released, and its id starts from nothing."""
        account = self._accounts.pop(replica, None)
        if account is not None:
            for reservation in tuple(account.open):
                reservation.release()

    def check_integrity(self) -> None:
        """Raises AssertionError when a replica's counters are not the sums over its open reservations."""
        for replica, account in self._accounts.items():
            states = [reservation.state for reservation in account.open]
            waiting = [r.prefill_tokens for r in account.open if r.state == "prefilling"]
            assert "released" not in states, f"{replica}: a released reservation is still open"
            assert account.prefilling == len(waiting), f"{replica}: {account.prefilling} prefilling"
            assert account.prefill_tokens == sum(waiting), (
                f"{replica}: {account.prefill_tokens} prefill tokens"
            )
            later = sum(
                r.prefill_tokens for r in account.open if r.state == "prefilling" and r.number > account.seen
            )
            assert account.on_its_way == later, f"{replica}: {account.on_its_way} tokens on their way"
            assert later <= account.pending <= account.prefill_tokens
            assert account.running == states.count("running"), f"{replica}: {account.running} running"
            assert all(reservation.replica == replica for reservation in account.open)
            assert 0 < account.last_chosen <= self._decisions
