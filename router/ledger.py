"""What this router has sent to each replica and not seen finished: counted at the moment of decision.

A replica's own load report arrives a fraction of a second late. Until then only the ledger knows of the
requests that were just decided, and it is what makes a burst spread instead of piling onto one idle
replica.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

State = Literal["prefilling", "running", "released"]


@dataclass(frozen=True, slots=True)
class OwnLoad:
    """What one router has open at one replica."""

    prefill_tokens: int = 0
    """Prompt tokens of requests without a first token that the replica was expected to compute."""
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
    __slots__ = ("last_chosen", "open", "prefill_tokens", "prefilling", "running")

    def __init__(self) -> None:
        self.open: set[Reservation] = set()
        self.prefill_tokens = 0
        self.prefilling = 0
        self.running = 0
        self.last_chosen = 0


class Reservation:
    """One request's place at one replica, from the decision to the end of the answer.

    Call order: `first_token` at most once that counts, then `release`. Both may be called again, and after
    the replica was forgotten: then they change nothing. As a context manager it releases on leaving.
    """

    __slots__ = ("_account", "_state", "number", "prefill_tokens", "replica", "request_id")

    def __init__(
        self, account: _Account, replica: str, request_id: str, prefill_tokens: int, number: int
    ) -> None:
        self.number = number
        """Counted over all replicas, from 1."""
        self.replica = replica
        self.request_id = request_id
        self.prefill_tokens = prefill_tokens
        self._account = account
        self._state: State = "prefilling"

    @property
    def state(self) -> State:
        return self._state

    def first_token(self) -> None:
        """The prefill is over: its tokens no longer weigh on the replica."""
        if self._state == "prefilling":
            self._leave_prefill()
            self._account.running += 1
            self._state = "running"

    def release(self) -> None:
        """The request has ended, in whatever way."""
        if self._state == "released":
            return
        if self._state == "prefilling":
            self._leave_prefill()
        else:
            self._account.running -= 1
        self._account.open.discard(self)
        self._state = "released"

    def _leave_prefill(self) -> None:
        self._account.prefilling -= 1
        self._account.prefill_tokens -= self.prefill_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Ledger:
    """Open reservations by replica. Not thread-safe; lives on a router's event loop."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._decisions = 0

    def reserve(self, replica: str, request_id: str, prefill_tokens: int) -> Reservation:
        """Count a request that was just decided. `prefill_tokens`: what the replica will have to compute.

        The same request may hold several reservations (a retry elsewhere, several prompts).
        Raises ValueError for a negative number of tokens.
        """
        if prefill_tokens < 0:
            raise ValueError(f"prefill_tokens of {request_id} is {prefill_tokens}; needed: 0 or more")
        account = self._accounts.setdefault(replica, _Account())
        self._decisions += 1
        reservation = Reservation(account, replica, request_id, prefill_tokens, self._decisions)
        account.open.add(reservation)
        account.prefill_tokens += prefill_tokens
        account.prefilling += 1
        account.last_chosen = self._decisions
        return reservation

    def prefilled(self, replica: str, up_to: int) -> None:
        """The replica has computed the prompts of all reservations up to that number.

        For answers that are not streamed this is the only sign of it before their end.
        """
        account = self._accounts.get(replica)
        if account is not None and account.prefilling:
            for reservation in account.open:
                if reservation.number <= up_to:
                    reservation.first_token()

    def load(self, replica: str) -> OwnLoad:
        """What is open at a replica; all zero for one never chosen."""
        account = self._accounts.get(replica)
        if account is None:
            return _IDLE
        return OwnLoad(account.prefill_tokens, account.prefilling, account.running, account.last_chosen)

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
            assert account.running == states.count("running"), f"{replica}: {account.running} running"
            assert all(reservation.replica == replica for reservation in account.open)
            assert 0 < account.last_chosen <= self._decisions
