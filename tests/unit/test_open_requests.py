"""A replica's account of what is open: every router's part is the sum over its requests, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache_store.events import MAX_SHARES, Load, Share
from router.ledger import Ledger, Reservation
from router.others_load import OthersLoad
from workers.messages import ReservationName
from workers.open_requests import OpenRequest, OpenRequests

A, B = "a" * 16, "b" * 16


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_request_counts_for_its_router_until_it_ends() -> None:
    account = OpenRequests()
    first = account.open(ReservationName(A, 5, 300))
    account.open(ReservationName(A, 3, 20))
    account.open(ReservationName(B, 1, 7))
    assert set(account.counts().shares) == {Share(A, 5, 2, 2, 320), Share(B, 1, 1, 1, 7)}
    first.end_prefill(300)
    assert account.counts().shares[0] == Share(A, 5, 2, 1, 20)
    first.close()
    first.close()
    assert account.counts()[:3] == (2, 2, 27)
    account.check_integrity()


def test_a_router_has_no_share_once_its_last_request_has_ended() -> None:
    account = OpenRequests()
    account.open(ReservationName(A, 5, 300)).close()
    assert account.counts() == (0, 0, 0, ())


def test_what_comes_past_the_routers_counts_and_is_nobodys_share() -> None:
    account = OpenRequests()
    direct = account.open()
    direct.begin_prefill(40, measured=False)
    assert account.counts() == (1, 1, 40, ())
    direct.end_prefill(40)
    assert account.counts() == (1, 0, 0, ())


def test_an_engine_that_looked_knows_better_than_a_router_what_it_computes() -> None:
    account = OpenRequests()
    looked, took = account.open(ReservationName(A, 1, 300)), account.open(ReservationName(A, 2, 300))
    looked.begin_prefill(90, measured=True)
    took.begin_prefill(1000, measured=False)
    assert (looked.tokens, took.tokens) == (90, 300)


def test_a_request_of_several_sequences_computes_until_each_has_its_first_output() -> None:
    account = OpenRequests()
    request = account.open(ReservationName(A, 1, 1000))
    for tokens in (100, 20, 30):
        request.begin_prefill(tokens, measured=True)
    assert account.counts().prefill_tokens == 150
    request.end_prefill(100)
    request.end_prefill(25)
    assert account.counts()[:3] == (1, 1, 25)
    request.end_prefill(25)
    request.end_prefill(25)
    assert account.counts()[:3] == (1, 0, 0)
    account.check_integrity()


def test_what_the_prompt_under_way_has_done_is_estimated_from_the_engines_rate() -> None:
    clock = Clock()
    account = OpenRequests(clock=clock)
    first, second = account.open(ReservationName(A, 1, 100)), account.open(ReservationName(B, 1, 100))
    clock.now = 3.0
    assert account.counts(prefill_rate=10).prefill_tokens == 170
    assert account.counts(prefill_rate=10).shares == (Share(A, 1, 1, 1, 70), Share(B, 1, 1, 1, 100))
    assert account.counts(prefill_rate=1000).prefill_tokens == 100
    assert account.counts(prefill_rate=0).prefill_tokens == 200
    clock.now = 11.0
    first.end_prefill(100)
    clock.now = 12.0
    assert account.counts(prefill_rate=10).shares == (Share(A, 1, 1, 0, 0), Share(B, 1, 1, 1, 90))
    second.close()
    clock.now = 50.0
    account.open(ReservationName(A, 2, 100))
    assert account.counts(prefill_rate=10).prefill_tokens == 100


def test_every_step_of_a_request_is_told() -> None:
    told: list[int] = []
    account = OpenRequests(lambda: told.append(len(account)))
    request = account.open()
    assert told == [1]
    request.end_prefill(0)
    assert told == [1, 1]
    request.close()
    assert told[-1] == 0


def test_so_many_routers_are_told_apart_and_no_more() -> None:
    account = OpenRequests()
    for number in range(MAX_SHARES + 1):
        account.open(ReservationName(f"{number:016x}", 1, 1))
    account.open(ReservationName(f"{MAX_SHARES:016x}", 2, 1))
    counts = account.counts()
    assert (counts.requests, len(counts.shares)) == (MAX_SHARES + 2, MAX_SHARES)
    assert f"{MAX_SHARES:016x}" in {share.router for share in counts.shares}


tokens = st.integers(0, 1000)


class RoutersAtOneReplica(RuleBasedStateMachine):
    """Two routers and a client past them at one replica, with requests, reports and answers on their way.

    Whatever overtakes what, a router's view of the others is what they had open when the replica made its report.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.account = OpenRequests(clock=self.clock)
        self.ledgers = [Ledger(A), Ledger(B)]
        self.on_the_way: list[Reservation] = []
        self.at_replica: list[tuple[OpenRequest, Reservation | None]] = []
        self.rate = 0

    @rule(router=st.integers(0, 1), tokens=tokens)
    def reserve(self, router: int, tokens: int) -> None:
        self.on_the_way.append(self.ledgers[router].reserve("it", "r", tokens))

    @rule(data=st.data(), known=st.booleans(), tokens=tokens)
    def arrive(self, data: st.DataObject, known: bool, tokens: int) -> None:
        """In any order."""
        if self.on_the_way:
            number = data.draw(st.integers(0, len(self.on_the_way) - 1))
            reservation = self.on_the_way.pop(number)
            request = self.account.open(reservation.name)
            self.at_replica.append((request, reservation))
            if known:
                request.begin_prefill(tokens, measured=True)

    @rule(tokens=tokens)
    def come_past_the_routers(self, tokens: int) -> None:
        request = self.account.open()
        request.begin_prefill(tokens, measured=False)
        self.at_replica.append((request, None))

    @rule(data=st.data(), seen=st.booleans(), tokens=tokens)
    def first_token(self, data: st.DataObject, seen: bool, tokens: int) -> None:
        if self.at_replica:
            request, reservation = data.draw(st.sampled_from(self.at_replica))
            request.end_prefill(tokens)
            if reservation is not None and seen:
                reservation.first_token()

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.at_replica:
            number = data.draw(st.integers(0, len(self.at_replica) - 1))
            request, reservation = self.at_replica.pop(number)
            request.close()
            if reservation is not None:
                reservation.release()

    @rule(router=st.integers(0, 1))
    def lose_a_router(self, router: int) -> None:
        """Its connections end, and its next life has another name."""
        dead = self.ledgers[router]
        self.on_the_way = [each for each in self.on_the_way if each.name.router != dead.router]
        for request, _ in self.at_replica:
            if request.router == dead.router:
                request.close()
        self.at_replica = [pair for pair in self.at_replica if not pair[0].closed]
        self.ledgers[router] = Ledger(f"{int(dead.router, 16) + 1:016x}")

    @rule(seconds=st.floats(0, 2), rate=st.integers(0, 1000))
    def work(self, seconds: float, rate: int) -> None:
        self.clock.now += seconds
        self.rate = rate

    @rule()
    def report(self) -> None:
        counts = self.account.counts(self.rate)
        load = Load(
            0, 0, counts.prefill_tokens, 0.0, 0.0, 0.0, http_requests=counts.requests,
            prefilling=counts.prefilling, shares=counts.shares,
        )  # fmt: skip
        for ledger in self.ledgers:
            share = load.share(ledger.router)
            theirs = [request for request, _ in self.at_replica if request.router != ledger.router]
            others = OthersLoad.of(load, share)
            assert others.prefilling == sum(request.prefilling for request in theirs)
            assert others.running == sum(not request.prefilling for request in theirs)
            assert 0 <= others.prefill_tokens <= sum(request.tokens for request in theirs)
            if not self.rate:
                assert others.prefill_tokens == sum(request.tokens for request in theirs)
            ledger.reported("it", share)

    @invariant()
    def sums_are_those_over_open_requests(self) -> None:
        self.account.check_integrity()
        for ledger in self.ledgers:
            ledger.check_integrity()
            unseen = sum(each.prefill_tokens for each in self.on_the_way if each.name.router == ledger.router)
            assert ledger.load("it").prefill_tokens <= unseen + sum(
                reservation.prefill_tokens
                for _, reservation in self.at_replica
                if reservation is not None and reservation.name.router == ledger.router
            )


RoutersAtOneReplica.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_a_view_of_the_others_is_exact_whatever_is_on_its_way = RoutersAtOneReplica.TestCase


@pytest.mark.parametrize("late", ["end_prefill", "close"])
def test_steps_that_come_after_the_end_change_nothing(late: str) -> None:
    account = OpenRequests()
    other, request = account.open(ReservationName(A, 1, 10)), account.open(ReservationName(A, 2, 10))
    request.close()
    request.begin_prefill(99, measured=True)
    if late == "close":
        request.close()
    else:
        request.end_prefill(99)
    assert account.counts().shares == (Share(A, 2, 1, 1, other.tokens),)
    account.check_integrity()
