"""Policies, one decision at a time: who is chosen, and how the choice explains itself."""

from __future__ import annotations

import random
import sys
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from router.candidates import Candidate, Candidates
from router.config import PolicyConfig, WeightsConfig
from router.loadable import Loadable
from router.policies import (
    KINDS,
    Choice,
    LeastLoadedPolicy,
    Policy,
    PolicyError,
    PredictedTtftPolicy,
    PrefixAffinityPolicy,
    RoundRobinPolicy,
    RouteRequest,
    SessionPolicy,
    policy_from,
)
from router.policies.picking import SHOWN
from router.policies.predicted_ttft import NEAR, NEAR_S
from router.speed import PRIOR
from tests.unit.policy_kit import REPLICAS

REQUEST = RouteRequest("r", 1000)
PREDICTED = PredictedTtftPolicy()
EVERY_POLICY = [policy_from(PolicyConfig(kind=kind)) for kind in KINDS]


def choose(policy: Policy, *rows: Candidate, request: RouteRequest = REQUEST) -> str | None:
    choice = policy.choose(request, Candidates.of(rows))
    return choice.replica if choice else None


def faster(factor: float) -> dict[str, Any]:
    named = PRIOR.named()
    return named | {"prefill_token_s": named["prefill_token_s"] / factor}


def test_the_replica_with_the_prefix_answers_while_it_is_not_much_busier() -> None:
    idle = Candidate("idle")
    assert choose(PREDICTED, idle, Candidate("warm", matched=768, running=1)) == "warm"
    assert choose(PREDICTED, idle, Candidate("warm", matched=768, pending=600, waiting=1)) == "warm"
    assert choose(PREDICTED, idle, Candidate("warm", matched=768, pending=2000, waiting=1)) == "idle"
    assert choose(PREDICTED, idle, Candidate("warm", matched=768, running=40)) == "idle"


def test_what_a_node_can_load_counts_for_what_loading_saves() -> None:
    near = Candidate("near", loadable=Loadable(dram=768))
    assert choose(PREDICTED, Candidate("none"), near) == "near"
    assert choose(PREDICTED, near, Candidate("own", matched=768)) == "own"
    slow = PRIOR.named() | {"load_token_s": [1.0, 1.0, 1.0, 1.0]}
    far = Candidate("far", loadable=Loadable(remote=768), speed=slow)
    choice = PREDICTED.choose(REQUEST, Candidates.of([far]))
    assert choice is not None
    assert choice.load_tokens == 0, "computing is faster"


def test_the_faster_of_two_replicas_answers() -> None:
    assert choose(PREDICTED, Candidate("slow"), Candidate("fast", speed=faster(4))) == "fast"
    assert (
        choose(PREDICTED, Candidate("slow"), Candidate("fast", pending=6000, waiting=1, speed=faster(4)))
        == "slow"
    )


def test_the_busier_the_cluster_the_more_a_prefix_is_worth_beside_a_shorter_line() -> None:
    def between(waiting: int) -> str | None:
        others = [Candidate(f"other-{n}", pending=90_000, waiting=waiting) for n in range(6)]
        warm = Candidate("warm", matched=900, pending=4000, waiting=1)
        return choose(PREDICTED, warm, Candidate("cold", pending=2500, waiting=1), *others)

    assert between(0) == "cold"
    assert between(12) == "warm"


def test_replicas_that_are_nearly_as_fast_take_turns() -> None:
    """Else the one that was measured a little slower would idle for ever, and never be measured again."""
    rows = [Candidate("a", last_chosen=2, speed=faster(1.05)), Candidate("b", last_chosen=1)]
    assert choose(PREDICTED, *rows) == "b"
    assert choose(PREDICTED, Candidate("a", last_chosen=2, speed=faster(1.5)), Candidate("b")) == "a"


def test_a_replica_whose_kv_runs_out_is_spared() -> None:
    full = Candidate("full", matched=256, kv_used=1.0)
    assert choose(PREDICTED, full, Candidate("free", kv_used=0.5)) == "free"
    assert choose(PREDICTED, Candidate("half", matched=256, kv_used=0.5), Candidate("free")) == "half"


def test_ties_go_to_fewest_open_requests_then_to_the_longest_unchosen() -> None:
    policy = PrefixAffinityPolicy(512)
    assert choose(policy, Candidate("one", running=1), Candidate("none", pending=512)) == "none"
    assert choose(PREDICTED, Candidate("a", last_chosen=9), Candidate("b", last_chosen=4)) == "b"


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_routers_that_just_started_do_not_all_pick_the_same_replica(policy: Policy) -> None:
    rows = [Candidate(replica) for replica in REPLICAS]
    first = Counter(choose(policy, *rows, request=RouteRequest(f"request-{n}", 1000)) for n in range(800))
    assert set(first) == set(REPLICAS)
    assert max(first.values()) < 200


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_roles_are_preferences(policy: Policy) -> None:
    prefill = Candidate("prefill", prefill_role=True, matched=1000)
    assert choose(policy, prefill, Candidate("decode", running=50)) == "decode"
    assert choose(policy, prefill) == "prefill"
    assert choose(policy, prefill, Candidate("decode", draining=True)) == "prefill"


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_nobody_is_chosen_when_nobody_may_be(policy: Policy) -> None:
    assert choose(policy) is None
    assert choose(policy, Candidate("a", draining=True)) is None


def test_a_choice_explains_itself_in_seconds() -> None:
    rows = [Candidate("a", matched=512, pending=1000, waiting=1, running=2), Candidate("b")]
    choice = PREDICTED.choose(REQUEST, Candidates.of(rows))
    assert choice is not None
    assert (choice.replica, choice.index, choice.matched_tokens, choice.load_tokens) == ("b", 1, 0, 0)
    assert choice.predicted == choice.scores[0].predicted
    assert choice.predicted is not None
    assert choice.predicted.queue_s == 0
    assert choice.predicted.prefill_s == choice.predicted.ttft_s == pytest.approx(0.01 + 1000 / 10_000)
    first, second = choice.scores
    assert (first.replica, second.replica) == ("b", "a")
    for score in choice.scores:
        assert score.predicted is not None
        assert score.cost == pytest.approx(score.predicted.ttft_s + score.predicted.others_s)
    assert second.predicted is not None
    assert second.predicted.queue_s == pytest.approx(0.105 + 0.0104 / 2)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_whatever_a_policy_goes_by_its_choice_tells_the_predicted_seconds(policy: Policy) -> None:
    rows = [
        Candidate(replica, matched=256 * n, pending=90 * n, waiting=1) for n, replica in enumerate(REPLICAS)
    ]
    choice = policy.choose(REQUEST, Candidates.of(rows))
    assert choice is not None
    assert choice.predicted is not None
    assert choice.predicted.ttft_s > 0
    assert len(choice.scores) == SHOWN
    assert choice.scores[0].replica == choice.replica == rows[choice.index].id
    assert [score.cost for score in choice.scores] == sorted(score.cost for score in choice.scores)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_the_last_prompt_token_is_always_computed(policy: Policy) -> None:
    choice = policy.choose(REQUEST, Candidates.of([Candidate("a", matched=1024, loadable=Loadable(512))]))
    assert choice is not None
    assert (choice.matched_tokens, choice.load_tokens) == (1000, 0)
    assert choice.predicted is not None
    assert choice.predicted.prefill_s == pytest.approx(0.01 + 1 / 10_000)


def test_round_robin_takes_the_longest_unchosen_whatever_it_holds() -> None:
    rows = [Candidate("a", last_chosen=3, matched=900), Candidate("b", last_chosen=1, running=9)]
    assert choose(RoundRobinPolicy(), *rows) == "b"


def test_least_loaded_does_not_ask_for_prefixes() -> None:
    rows = [Candidate("a", matched=900, running=2), Candidate("b", pending=900)]
    assert choose(LeastLoadedPolicy(512), *rows) == "b"
    assert choose(LeastLoadedPolicy(100), *rows) == "a"


def test_prefix_affinity_counts_tokens() -> None:
    policy = PrefixAffinityPolicy(512)
    idle = Candidate("idle")
    assert choose(policy, idle, Candidate("warm", matched=768, running=1)) == "warm"
    assert choose(policy, idle, Candidate("warm", matched=768, running=2)) == "idle"
    assert choose(policy, idle, Candidate("warm", matched=768, pending=800)) == "idle"
    assert choose(policy, idle, Candidate("near", loadable=Loadable(peer=500))) == "near"


def test_a_session_stays_at_its_replica_whatever_the_load() -> None:
    rows = [Candidate(replica) for replica in REPLICAS]
    homes = {}
    for session in map(str, range(200)):
        asked = [RouteRequest(f"{session}/{turn}", 100 * turn + 1, session=session) for turn in range(3)]
        loaded = [Candidate(row.id, running=9, pending=5000) for row in rows]
        found = {choose(SessionPolicy(), *each, request=r) for r in asked for each in (rows, loaded)}
        assert len(found) == 1
        homes[session] = found.pop()
    assert max(Counter(homes.values()).values()) < 50
    fewer = [row for row in rows if row.id != REPLICAS[3]]
    for session, home in homes.items():
        again = choose(SessionPolicy(), *fewer, request=RouteRequest("r", 10, session=session))
        assert again == home or home == REPLICAS[3], "only who was there moves"


def test_the_configuration_names_the_policy_and_its_weights() -> None:
    weights = WeightsConfig(behind=2, streams=0.5, decode=0.25, room=3, output_tokens=64, request_tokens=100)
    made = [policy_from(PolicyConfig(kind=kind, weights=weights)) for kind in KINDS]
    assert made == [
        PredictedTtftPolicy(2, 0.5, 0.25, 3, 64),
        PrefixAffinityPolicy(100),
        LeastLoadedPolicy(100),
        RoundRobinPolicy(),
        SessionPolicy(),
    ]
    defaults = [policy_from(PolicyConfig(kind=kind)) for kind in KINDS]
    assert defaults == [
        PredictedTtftPolicy(),
        PrefixAffinityPolicy(),
        LeastLoadedPolicy(),
        RoundRobinPolicy(),
        SessionPolicy(),
    ], "the defaults say the same in both places"
    assert isinstance(policy_from(PolicyConfig()), PrefixAffinityPolicy)


class FirstPolicy:
    """Somebody's own."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def choose(self, request: RouteRequest, candidates: Candidates) -> Choice | None:
        return Choice(candidates.ids[self.offset], self.offset, 0)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("elsewhere")
    module.FirstPolicy = FirstPolicy  # type: ignore[attr-defined]
    module.Nothing = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elsewhere", module)


@pytest.mark.usefixtures("elsewhere")
def test_a_policy_of_ones_own_is_named_by_module_and_class() -> None:
    policy = policy_from(PolicyConfig(kind="elsewhere:FirstPolicy", options={"offset": 1}))
    assert choose(policy, Candidate("a"), Candidate("b")) == "b"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "nowhere_at_all:Policy",
            {},
            "No module named 'nowhere_at_all'; needed: a module that the routers can import",
        ),
        ("elsewhere:Other", {}, "the module elsewhere has no Other"),
        ("elsewhere:FirstPolicy", {"ofset": 1}, "can't be made of router.policy.options .*ofset"),
        ("elsewhere:Nothing", {}, "Nothing has no method `choose`"),
    ],
)
def test_a_policy_that_cant_be_made_says_why(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy_from(PolicyConfig(kind=kind, options=options))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "affinity"},
            "kind is 'affinity'; needed: one of predicted_ttft, .*or package.module:Class",
        ),
        ({"options": {"a": 1}}, "options has a; needed: none, since prefix_affinity goes by `weights`"),
    ],
)
def test_a_configuration_that_names_no_policy_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PolicyConfig(**fields)


def test_every_kind_that_the_configuration_knows_can_be_made() -> None:
    from router.config import POLICIES

    assert set(POLICIES) == set(KINDS)


def ttft_s(choice: Choice) -> float:
    assert choice.predicted is not None
    return choice.predicted.ttft_s


tokens = st.integers(0, 8).map(lambda n: n * 256)
drawn = st.lists(
    st.builds(
        Candidate,
        id=st.sampled_from(REPLICAS),
        matched=tokens,
        loadable=st.builds(Loadable, tokens, tokens, tokens, tokens),
        pending=st.integers(0, 4).map(lambda n: n * 512),
        waiting=st.integers(0, 3),
        running=st.integers(0, 3),
        kv_used=st.floats(0, 1),
        prefill_role=st.booleans(),
        draining=st.booleans(),
        last_chosen=st.integers(0, 3),
        speed=st.sampled_from([PRIOR.named(), faster(3)]),
    ),
    max_size=8,
    unique_by=lambda row: row.id,
)


@given(rows=drawn, order=st.randoms(use_true_random=False), policy=st.sampled_from(EVERY_POLICY))
def test_a_choice_depends_on_the_candidates_and_not_on_their_order(
    rows: list[Candidate], order: random.Random, policy: Policy
) -> None:
    choice = policy.choose(REQUEST, Candidates.of(rows))
    shuffled = list(rows)
    order.shuffle(shuffled)
    again = policy.choose(REQUEST, Candidates.of(shuffled))
    assert (choice and choice.replica) == (again and again.replica)
    usable = {row.id: row for row in rows if not row.draining}
    assert (choice is None) == (not usable)
    if choice is not None:
        assert choice.replica in usable
        assert choice.scores[0].replica == choice.replica
        least = min(score.cost for score in choice.scores)
        assert least <= choice.scores[0].cost <= least + max(NEAR * ttft_s(choice), NEAR_S) + 1e-9
        answering = [row for row in usable.values() if not row.prefill_role]
        assert not answering or not usable[choice.replica].prefill_role
