"""The columns of a router's replicas: what a decision reads is what ledger, reports and index say at that moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_store.events import PROTOCOL_VERSION, Hello, Load
from router.calibration import Observation
from router.candidates import Candidate, Candidates
from router.choice import RouteRequest
from router.directory import Directory, ReplicaEntry
from router.fleet import Fleet
from router.holdings import loadable_chunks, matched_chunks
from router.index import PrefixIndex
from router.ledger import Ledger
from router.others_load import OthersLoad
from router.plan import loadable
from router.prediction import predict
from router.recent import RecentPrefixes
from router.speed import Speed
from tests.unit.policy_kit import chunk_keys
from workers.messages import ReplicaInfo, Role

REPORT = Load(waiting=0, running=1, prefill_tokens=900, kv_used=0.25, prefill_rate=0, decode_rate=0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def entry(
    replica: str, node: str = "node", role: Role = "unified", load: Load | None = REPORT
) -> ReplicaEntry:
    directory = Directory(PrefixIndex(), Ledger(), RecentPrefixes(), "secret", 5.0, lambda: None, Clock())
    made = directory._entry(ReplicaInfo(replica, role, node, "127.0.0.1:1", ("toy",)))
    made.load, made.stream.hello = load, Hello(PROTOCOL_VERSION, replica, 1, b"identity" * 4, 256)
    return made


class Kept:
    """A fleet of some replicas, with the ledger that it reads."""

    def __init__(self, *entries: ReplicaEntry) -> None:
        self.clock, self.ledger = Clock(), Ledger()
        self.fleet = Fleet[ReplicaEntry](self.ledger, self.clock)
        self.entries = list(entries)
        self.fleet.update(self.entries)

    def candidates(self) -> Candidates:
        pool = self.fleet.pool(self.entries, "toy")
        nothing = np.zeros(len(pool.ids), dtype=np.int64)
        return self.fleet.candidates(pool, nothing, np.zeros((len(pool.ids), 4), dtype=np.int64))

    def row(self, replica: str) -> Candidate:
        return next(row for row in self.candidates().rows() if row.id == replica)


def test_a_row_adds_to_own_load_what_the_replica_reports_of_others() -> None:
    a = entry("a", role="prefill")
    a.others = OthersLoad(prefill_tokens=500, prefilling=1, running=2)
    kept = Kept(a, entry("b"))
    kept.ledger.reserve("a", "r1", 900).first_token()
    kept.ledger.reserve("a", "r2", 70)
    row = kept.row("a")
    assert (row.pending, row.waiting, row.running) == (570, 2, 3)
    assert (row.kv_used, row.prefill_role, row.draining, row.last_chosen) == (0.25, True, False, 2)
    assert kept.row("b") == Candidate("b", kv_used=0.25)


def test_what_happens_at_a_replica_is_seen_by_the_next_decision() -> None:
    kept = Kept(entry("a"))
    reservation = kept.ledger.reserve("a", "r", 100)
    assert (kept.row("a").pending, kept.row("a").waiting) == (100, 1)
    reservation.first_token()
    assert (kept.row("a").pending, kept.row("a").waiting, kept.row("a").running) == (0, 0, 1)
    reservation.release()
    assert kept.row("a").running == 0


def queue_s(row: Candidate) -> float:
    return float(predict(RouteRequest("r", 1), Candidates.of([row])).queue_s[0])


def test_the_queue_becomes_shorter_between_reports() -> None:
    """At the speed that the replica is known for: 10 ms a prompt and 0.1 ms a token as long as nothing was seen."""
    kept = Kept(entry("a"))
    first = kept.ledger.reserve("a", "first", 1000)
    assert queue_s(kept.row("a")) == pytest.approx(0.105)
    kept.clock.now += 0.04
    assert queue_s(kept.row("a")) == pytest.approx(0.065)
    second = kept.ledger.reserve("a", "second", 500)
    assert queue_s(kept.row("a")) == pytest.approx(0.065 + 0.06), "it joined a line that had moved on"
    first.first_token()
    row = kept.row("a")
    assert (row.pending, row.waited_s) == (500, 0), "its own prefill begins now"
    kept.clock.now += 60
    assert kept.row("a").pending == 500
    assert queue_s(kept.row("a")) <= 0.01, "but for the decode step of the first one"
    kept.ledger.reserve("a", "third", 300)
    row = kept.row("a")
    assert (row.pending, row.waited_s) == (800, 0), "what was not done in all that time counts anew"
    second.release()


def test_another_report_starts_the_count_anew() -> None:
    kept = Kept(entry("a"))
    kept.entries[0].others = OthersLoad(prefill_tokens=1000, prefilling=1)
    kept.ledger.changed.add("a")
    assert kept.row("a").pending == 1000
    kept.clock.now += 0.05
    assert kept.row("a").waited_s == pytest.approx(0.05)
    kept.entries[0].load = Load(
        waiting=0, running=1, prefill_tokens=1000, kv_used=0.5, prefill_rate=0, decode_rate=0
    )
    kept.ledger.changed.add("a")
    row = kept.row("a")
    assert (row.pending, row.waited_s, row.kv_used) == (1000, 0, 0.5)


def test_what_was_learned_of_a_replica_is_in_its_column_and_goes_with_it() -> None:
    kept = Kept(entry("a"), entry("b"))
    for _ in range(20):
        kept.fleet.observe("a", Observation(5.0, 1000, 0))
    learned = kept.row("a").speed
    assert Speed.from_named(learned).prefill_s(1000, 0) == pytest.approx(5.0, rel=0.05)
    assert kept.row("b").speed == learned, "who was not seen is believed to be like the others"
    kept.entries = kept.entries[1:]
    kept.fleet.update(kept.entries)
    kept.fleet.observe("a", Observation(500.0, 1000, 0))
    assert kept.candidates().ids == ["b"]
    assert kept.row("b").speed == learned, "of one that has left nothing is learned"
    kept.fleet.check_integrity()


def test_replicas_of_another_role_or_model_are_learned_apart() -> None:
    other = entry("other")
    other.stream.hello = Hello(PROTOCOL_VERSION, "other", 1, b"another." * 4, 256)
    kept = Kept(entry("a"), entry("alike"), entry("prefill", role="prefill"), other)
    before = kept.row("a").speed
    for _ in range(20):
        kept.fleet.observe("a", Observation(5.0, 1000, 0))
    assert kept.row("alike").speed == kept.row("a").speed != before
    assert kept.row("prefill").speed == kept.row("other").speed == before


def test_what_a_replica_is_may_be_said_after_it_was_named() -> None:
    late = entry("late", load=None)
    late.stream.hello = None
    kept = Kept(entry("a"), late)
    for _ in range(20):
        kept.fleet.observe("a", Observation(5.0, 1000, 0))
    assert kept.row("late").speed != kept.row("a").speed
    late.load, late.stream.hello = REPORT, kept.entries[0].hello
    kept.ledger.changed.add("late")
    assert kept.row("late").speed == kept.row("a").speed
    kept.fleet.check_integrity()


@settings(deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_columns_follow_whatever_comes_and_goes(draw: random.Random) -> None:
    kept, open_ = Kept(), []
    for number in range(40):
        match draw.randrange(5):
            case 0:
                kept.entries.append(entry(f"r{number}", role=draw.choice(["unified", "prefill"])))
                kept.fleet.update(kept.entries)
            case 1 if kept.entries:
                gone = kept.entries.pop(draw.randrange(len(kept.entries)))
                kept.ledger.forget(gone.info.id)
                kept.fleet.update(kept.entries)
            case 2 if kept.entries:
                replica = draw.choice(kept.entries).info.id
                open_.append(kept.ledger.reserve(replica, f"q{number}", draw.randrange(5000)))
            case 3 if open_:
                draw.choice(open_).first_token()
            case 4 if open_:
                open_.pop(draw.randrange(len(open_))).release()
        kept.clock.now += draw.random() / 10
        for row in kept.candidates().rows():
            own = kept.ledger.load(row.id)
            assert (row.waiting, row.running, row.last_chosen) == (
                own.prefilling,
                own.running,
                own.last_chosen,
            )
            assert row.pending == own.prefill_tokens
            assert row.waited_s >= 0
        kept.fleet.check_integrity()


def shuffled_index(
    draw: random.Random, holders: Sequence[str], caches: Sequence[str], labels: Sequence[str]
) -> PrefixIndex:
    index, keys = PrefixIndex(), chunk_keys(labels)
    for holder in holders:
        index.apply(holder, "hbm", keys[: draw.randrange(len(keys) + 1)])
    for cache in caches:
        for tier in ("dram", "disk", "remote"):
            if draw.random() < 0.5:
                index.apply(cache, tier, draw.sample(keys, draw.randrange(len(keys))))
    return index


@given(draw=st.randoms(use_true_random=False))
def test_what_replicas_hold_is_the_same_taken_together_as_one_by_one(draw: random.Random) -> None:
    nodes = {f"node-{n}": draw.choice(["", f"cache-{n}"]) for n in range(3)}
    entries = [entry(f"r{n}", node=draw.choice(list(nodes))) for n in range(6)]
    kept = Kept(*entries)
    pool = kept.fleet.pool(entries, "toy")
    labels = [f"{n}" for n in range(8)]
    index = shuffled_index(draw, [*pool.ids[:4], "somebody-else"], [c for c in nodes.values() if c], labels)
    match = index.match(chunk_keys(labels))
    recent: Mapping[str, int] = {"r0": 3, "r5": 2, "gone": 4}
    holder: Callable[[str], str] = nodes.__getitem__
    matched = matched_chunks(pool, [(match, recent)])
    ahead = loadable_chunks(pool, match, matched, holder)
    for at, each in enumerate(entries):
        replica = each.info.id
        assert matched[at] == max(match.leading(replica), recent.get(replica, 0))
        assert tuple(ahead[at]) == loadable(match, int(matched[at]), nodes[each.info.node])
