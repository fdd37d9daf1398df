"""The ledger: a decision counts from its moment on, and nothing counts twice or for ever."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache_store.events import Share
from router.ledger import Ledger, OwnLoad, Reservation
from workers.messages import pack_reservation, unpack_reservation

REPLICAS = ("a", "b", "c")


def test_a_reservation_counts_at_once_and_moves_from_prefilling_to_running() -> None:
    ledger = Ledger()
    reservation = ledger.reserve("a", "r1", 1000)
    assert ledger.load("a") == OwnLoad(prefill_tokens=1000, prefilling=1, running=0, last_chosen=1)
    reservation.first_token()
    assert ledger.load("a") == OwnLoad(prefill_tokens=0, prefilling=0, running=1, last_chosen=1)
    reservation.release()
    assert ledger.load("a") == OwnLoad(last_chosen=1)
    assert ledger.open_requests() == 0


def test_release_and_first_token_may_come_again_and_late() -> None:
    ledger = Ledger()
    other = ledger.reserve("a", "other", 10)
    reservation = ledger.reserve("a", "r1", 1000)
    for _ in range(2):
        reservation.release()
        reservation.first_token()
    assert ledger.load("a").open_requests == 1
    assert ledger.load("a").prefill_tokens == other.prefill_tokens
    ledger.check_integrity()


def test_a_reservation_is_released_when_its_block_fails() -> None:
    ledger = Ledger()
    with pytest.raises(RuntimeError, match="replica died"), ledger.reserve("a", "r1", 5):
        raise RuntimeError("replica died")
    assert ledger.open_requests() == 0


def test_a_replica_that_comes_back_under_its_old_name_starts_from_nothing() -> None:
    ledger = Ledger()
    stale = ledger.reserve("a", "r1", 1000)
    ledger.forget("a")
    assert stale.state == "released"
    ledger.reserve("a", "r2", 7)
    stale.release()
    assert ledger.load("a").prefill_tokens == 7
    assert ledger.load("a").open_requests == 1


def test_one_request_may_hold_several_places() -> None:
    ledger = Ledger()
    first, second = ledger.reserve("a", "r1", 10), ledger.reserve("b", "r1", 20)
    first.release()
    assert ledger.load("b").prefill_tokens == 20
    second.release()
    assert ledger.open_requests() == 0


def test_the_latest_choice_is_numbered_over_all_replicas() -> None:
    ledger = Ledger()
    for replica in ("a", "b", "a"):
        ledger.reserve(replica, "r", 1).release()
    assert [ledger.load(replica).last_chosen for replica in REPLICAS] == [3, 2, 0]


def test_a_negative_prefill_is_refused_by_name() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="r1 is -1"):
        ledger.reserve("a", "r1", -1)
    assert ledger.open_requests() == 0


class LedgerAgainstList(RuleBasedStateMachine):
    """Any order of calls leaves the counters equal to sums over the open reservations."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.all: list[Reservation] = []

    @rule(replica=st.sampled_from(REPLICAS), tokens=st.integers(0, 10_000))
    def reserve(self, replica: str, tokens: int) -> None:
        self.all.append(self.ledger.reserve(replica, f"r{len(self.all)}", tokens))

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        if self.all:
            data.draw(st.sampled_from(self.all)).first_token()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.all:
            data.draw(st.sampled_from(self.all)).release()

    @rule(replica=st.sampled_from(REPLICAS))
    def forget(self, replica: str) -> None:
        self.ledger.forget(replica)
        assert self.ledger.load(replica) == OwnLoad()

    @invariant()
    def counts_what_is_open(self) -> None:
        self.ledger.check_integrity()
        for replica in REPLICAS:
            mine = [r for r in self.all if r.replica == replica and r.state != "released"]
            load = self.ledger.load(replica)
            assert load.open_requests == len(mine)
            assert load.prefill_tokens == sum(r.prefill_tokens for r in mine if r.state == "prefilling")
        assert self.ledger.open_requests() == sum(r.state != "released" for r in self.all)


LedgerAgainstList.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
test_counters_are_sums_over_open_reservations = LedgerAgainstList.TestCase


def share(ledger: Ledger, seen: int, requests: int, prefilling: int, prefill_tokens: int) -> Share:
    return Share(ledger.router, seen, requests, prefilling, prefill_tokens)


def test_prompts_that_a_replica_has_computed_weigh_no_more_though_no_token_was_seen() -> None:
    ledger = Ledger()
    first, second, later = (ledger.reserve("a", name, 100) for name in ("first", "second", "later"))
    second.release()
    elsewhere = ledger.reserve("b", "elsewhere", 100)
    ledger.reported("a", share(ledger, seen=second.number, requests=1, prefilling=0, prefill_tokens=0))
    ledger.reported("nobody", share(ledger, seen=99, requests=9, prefilling=0, prefill_tokens=0))
    assert (ledger.load("a").prefill_tokens, ledger.load("a").open_requests) == (100, 2)
    assert [each.state for each in (first, second, later, elsewhere)] == [
        "running",
        "released",
        "prefilling",
        "prefilling",
    ]
    first.first_token()
    first.release()
    ledger.check_integrity()
    assert ledger.load("a").open_requests == 1


def test_a_prefill_that_is_under_way_weighs_what_the_replica_says_is_left_of_it() -> None:
    ledger = Ledger()
    first = ledger.reserve("a", "first", 1000)
    ledger.reported("a", share(ledger, seen=1, requests=1, prefilling=1, prefill_tokens=400))
    assert ledger.load("a").prefill_tokens == 400
    on_its_way = ledger.reserve("a", "on its way", 70)
    assert ledger.load("a").prefill_tokens == 470
    first.first_token()
    assert ledger.load("a").prefill_tokens == 70
    on_its_way.release()
    assert ledger.load("a").prefill_tokens == 0
    ledger.check_integrity()


def test_a_request_that_was_overtaken_on_its_way_keeps_its_weight() -> None:
    ledger = Ledger()
    overtaken, first = ledger.reserve("a", "overtaken", 1000), ledger.reserve("a", "first", 10)
    ledger.reported("a", share(ledger, seen=first.number, requests=1, prefilling=0, prefill_tokens=0))
    assert ledger.load("a").prefill_tokens == 1010
    assert overtaken.state == "prefilling"
    ledger.reported("a", share(ledger, seen=first.number, requests=2, prefilling=1, prefill_tokens=900))
    assert ledger.load("a").prefill_tokens == 900


def test_a_replica_never_makes_a_prompt_weigh_more_than_the_router_thought() -> None:
    ledger = Ledger()
    ledger.reserve("a", "r", 100)
    ledger.reported("a", share(ledger, seen=1, requests=1, prefilling=1, prefill_tokens=5000))
    assert ledger.load("a").prefill_tokens == 100


def test_every_router_has_a_name_of_its_own_which_its_reservations_carry() -> None:
    one, other = Ledger(), Ledger()
    assert one.router != other.router
    name = one.reserve("a", "r", 12).name
    assert unpack_reservation(pack_reservation(name)) == (one.router, 1, 12)
