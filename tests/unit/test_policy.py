"""The policy: prefixes attract, load repels, and nobody is overrun."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from cache_store.events import ChunkKey, Load
from router.config import PolicyConfig
from router.index import PrefixIndex
from router.ledger import Ledger, OwnLoad
from router.policy import (
    Cost,
    Policy,
    PrefixAffinityPolicy,
    PrefixLoadCost,
    ReplicaView,
    RoundRobinPolicy,
    RouteRequest,
    policy_from,
)

CHUNK_TOKENS = 256
AFFINITY = PrefixAffinityPolicy(PrefixLoadCost())
REPLICAS = tuple(f"replica-{number}" for number in range(8))


def chunk_keys(labels: Sequence[str]) -> list[ChunkKey]:
    """Keys of a prompt whose chunks are named by labels: a chain, as real keys are."""
    keys, parent = [], b""
    for label in labels:
        parent = blake3(parent + label.encode()).digest()
        keys.append(ChunkKey(parent))
    return keys


@dataclass(frozen=True)
class Prompt:
    id: str
    labels: tuple[str, ...]
    tail_tokens: int = 0

    @property
    def tokens(self) -> int:
        return CHUNK_TOKENS * len(self.labels) + self.tail_tokens


class SimulatedCluster:
    """Replicas that prefill in turn and decode side by side, behind the real index and ledger.

    Time is simulated: events are taken in order, so a run is a function of its arguments.
    """

    prefill_tokens_per_s = 20_000.0

    def __init__(self, policy: Policy, replicas: Sequence[str] = REPLICAS) -> None:
        self.policy = policy
        self.index = PrefixIndex()
        self.ledger = Ledger()
        self.now = 0.0
        self.chosen: dict[str, str] = {}
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._busy_until = dict.fromkeys(replicas, 0.0)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), action))

    def run(self) -> None:
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        self.index.check_integrity()
        self.ledger.check_integrity()
        assert self.ledger.open_requests() == 0

    def send(self, prompt: Prompt, decode_s: float, then: Callable[[], None] = lambda: None) -> None:
        keys = chunk_keys(prompt.labels)
        match = self.index.match(keys)
        views = [
            ReplicaView.combine(
                replica, "unified", CHUNK_TOKENS * match.leading(replica), self.ledger.load(replica), None
            )
            for replica in self._busy_until
        ]
        choice = self.policy.choose(RouteRequest(prompt.id, prompt.tokens), views)
        assert choice is not None
        replica, missing = choice.replica, prompt.tokens - choice.matched_tokens
        self.chosen[prompt.id] = replica
        self.prompt_tokens += prompt.tokens
        self.cached_tokens += choice.matched_tokens
        reservation = self.ledger.reserve(replica, prompt.id, missing)

        def first_token() -> None:
            self.index.apply(replica, "hbm", added=keys)
            reservation.first_token()

        def end() -> None:
            reservation.release()
            then()

        prefilled = max(self.now, self._busy_until[replica]) + missing / self.prefill_tokens_per_s
        self._busy_until[replica] = prefilled
        self.at(prefilled, first_token)
        self.at(prefilled + decode_s, end)

    def busiest_over_mean(self) -> float:
        counts = Counter(self.chosen.values())
        return max(counts.values()) * len(self._busy_until) / len(self.chosen)


def closed_loop(
    cluster: SimulatedCluster, prompts: Sequence[Prompt], clients: int, decode_s: Callable[[], float]
) -> None:
    """Each client sends its next prompt when its last one is answered."""
    remaining = iter(prompts)

    def send_next() -> None:
        prompt = next(remaining, None)
        if prompt is not None:
            cluster.send(prompt, decode_s(), send_next)

    for client in range(clients):
        cluster.at(client * 0.001, send_next)
    cluster.run()


def test_64_simultaneous_distinct_long_prompts_take_8_of_each_replica() -> None:
    cluster = SimulatedCluster(AFFINITY)
    for number in range(64):
        labels = tuple(f"{number}/{chunk}" for chunk in range(32))
        cluster.at(0.0, partial(cluster.send, Prompt(f"r{number}", labels), 1.0))
    cluster.run()
    assert Counter(cluster.chosen.values()) == dict.fromkeys(REPLICAS, 8)


@pytest.mark.parametrize("seed", range(10))
def test_64_simultaneous_prompts_of_different_lengths_take_8_of_each_give_or_take_one(seed: int) -> None:
    lengths = random.Random(seed)
    cluster = SimulatedCluster(AFFINITY)
    for number in range(64):
        prompt = Prompt(f"r{number}", (), lengths.randint(7000, 9000))
        cluster.at(0.0, partial(cluster.send, prompt, 1.0))
    cluster.run()
    counts = Counter(cluster.chosen.values())
    assert set(counts) == set(REPLICAS)
    assert set(counts.values()) <= {7, 8, 9}


@pytest.mark.parametrize("clients", [16, 32, 64])
def test_a_system_prompt_that_all_share_overruns_nobody(clients: int) -> None:
    draw = random.Random(clients)
    system = tuple(f"system/{chunk}" for chunk in range(16))
    prompts = [
        Prompt(
            f"r{n}", (*system, *(f"{n}/{chunk}" for chunk in range(draw.randint(0, 3)))), draw.randint(1, 255)
        )
        for n in range(400)
    ]
    cluster = SimulatedCluster(AFFINITY)
    closed_loop(cluster, prompts, clients, lambda: draw.uniform(0.2, 1.0))
    assert cluster.busiest_over_mean() <= 1.3
    assert cluster.cached_tokens / cluster.prompt_tokens > 0.7, "and the prefix is still used"


def test_without_a_load_term_the_shared_prefix_would_take_everyone() -> None:
    system = tuple(f"system/{chunk}" for chunk in range(16))
    prompts = [Prompt(f"r{n}", system, 1 + n % 200) for n in range(400)]

    @dataclass(frozen=True)
    class LongestMatch:
        def cost(self, request: RouteRequest, view: ReplicaView) -> Cost:
            return Cost(float(-view.matched_tokens), {})

    cluster = SimulatedCluster(PrefixAffinityPolicy(LongestMatch()))
    closed_loop(cluster, prompts, 4, lambda: 0.5)
    assert cluster.busiest_over_mean() > 1.9, "the simulation can show what the load term is for"


def test_conversations_stay_where_their_history_is() -> None:
    draw = random.Random(3)
    cluster = SimulatedCluster(AFFINITY)
    sessions, turns = 24, 8

    def take_turn(session: int, turn: int) -> None:
        labels = tuple(f"{session}/{chunk}" for chunk in range(8 * (turn + 1)))
        prompt = Prompt(f"{session}.{turn}", labels, 40)
        cluster.send(prompt, 0.5, lambda: think(session, turn + 1))

    def think(session: int, turn: int) -> None:
        if turn < turns:
            cluster.at(cluster.now + draw.uniform(0.5, 1.5), lambda: take_turn(session, turn))

    for session in range(sessions):
        cluster.at(draw.uniform(0, 2), partial(take_turn, session, 0))
    cluster.run()
    returned = sum(
        cluster.chosen[f"{s}.{turn}"] == cluster.chosen[f"{s}.{turn - 1}"]
        for s in range(sessions)
        for turn in range(1, turns)
    )
    assert returned / (sessions * (turns - 1)) > 0.95
    assert set(cluster.chosen.values()) == set(REPLICAS), "and conversations are shared out"


def test_equally_long_prompts_without_a_common_prefix_spread() -> None:
    prompts = [Prompt(f"r{n}", tuple(f"{n}/{chunk}" for chunk in range(8))) for n in range(400)]
    cluster = SimulatedCluster(AFFINITY)
    closed_loop(cluster, prompts, 16, lambda: 0.5)
    assert cluster.busiest_over_mean() <= 1.1


def test_affinity_reuses_far_more_than_round_robin() -> None:
    def hit_ratio(policy: Policy) -> float:
        draw = random.Random(5)
        cluster = SimulatedCluster(policy)
        groups = [f"document-{n}" for n in range(24)]
        prompts = [
            Prompt(f"r{n}", tuple(f"{group}/{chunk}" for chunk in range(12)), 30)
            for n, group in enumerate(draw.choices(groups, k=300))
        ]
        closed_loop(cluster, prompts, 12, lambda: draw.uniform(0.1, 0.5))
        return cluster.cached_tokens / cluster.prompt_tokens

    assert hit_ratio(AFFINITY) > 1.5 * hit_ratio(RoundRobinPolicy())


def test_round_robin_takes_turns() -> None:
    cluster = SimulatedCluster(RoundRobinPolicy(), REPLICAS[:3])
    closed_loop(cluster, [Prompt(f"r{n}", ("same",)) for n in range(9)], 1, lambda: 0.1)
    chosen = [cluster.chosen[f"r{n}"] for n in range(9)]
    assert set(chosen[:3]) == set(REPLICAS[:3])
    assert chosen == chosen[:3] * 3


REQUEST = RouteRequest("r", 1000)


def choose(*views: ReplicaView, request: RouteRequest = REQUEST) -> str | None:
    choice = AFFINITY.choose(request, views)
    return choice.replica if choice else None


def test_the_replica_with_the_prefix_answers_while_it_is_not_much_busier() -> None:
    idle = ReplicaView("idle")
    assert choose(idle, ReplicaView("warm", matched_tokens=768, open_requests=1)) == "warm"
    assert choose(idle, ReplicaView("warm", matched_tokens=768, open_requests=2)) == "idle"
    assert choose(idle, ReplicaView("warm", matched_tokens=768, prefill_tokens=800)) == "idle"


def test_ties_go_to_fewest_open_requests_then_to_the_longest_unchosen() -> None:
    assert choose(
        ReplicaView("one-open", prefill_tokens=0, open_requests=1),
        ReplicaView("none-open", prefill_tokens=512, open_requests=0),
    ) == "none-open"  # fmt: skip
    assert choose(ReplicaView("a", last_chosen=9), ReplicaView("b", last_chosen=4)) == "b"


def test_routers_that_just_started_do_not_all_pick_the_same_replica() -> None:
    views = [ReplicaView(replica) for replica in REPLICAS]
    first = Counter(choose(*views, request=RouteRequest(f"request-{n}", 1000)) for n in range(800))
    assert set(first) == set(REPLICAS)
    assert max(first.values()) < 200


def test_roles_are_preferences() -> None:
    prefill = ReplicaView("prefill", role="prefill", matched_tokens=1000)
    busy = ReplicaView("decode", role="decode", open_requests=50)
    assert choose(prefill, busy) == "decode"
    assert choose(prefill) == "prefill"
    assert choose(prefill, ReplicaView("decode", role="decode", draining=True)) == "prefill"


@pytest.mark.parametrize("policy", [AFFINITY, RoundRobinPolicy()])
def test_nobody_is_chosen_when_nobody_may_be(policy: Policy) -> None:
    assert policy.choose(REQUEST, []) is None
    assert policy.choose(REQUEST, [ReplicaView("a", draining=True)]) is None


def test_a_choice_explains_itself() -> None:
    choice = AFFINITY.choose(
        REQUEST, [ReplicaView("a", matched_tokens=512, prefill_tokens=30, open_requests=2), ReplicaView("b")]
    )
    assert choice is not None
    assert (choice.replica, choice.matched_tokens) == ("b", 0)
    assert [score.replica for score in choice.scores] == ["a", "b"]
    assert choice.scores[0].cost == Cost(1542.0, {"missing": 488.0, "pending": 30.0, "load": 1024.0})


def test_the_last_prompt_token_is_always_computed() -> None:
    choice = AFFINITY.choose(REQUEST, [ReplicaView("a", matched_tokens=1024)])
    assert choice is not None
    assert choice.scores[0].cost.total == 1.0
    assert choice.matched_tokens == 1000


REPORT = Load(
    waiting=1, running=1, prefill_tokens=2000, kv_used=0.5, prefill_rate=0, decode_rate=0, http_requests=3
)


def test_a_view_adds_to_own_load_what_the_replica_reports_of_others() -> None:
    own = OwnLoad(prefill_tokens=900, prefilling=2, running=3, last_chosen=17)
    then = OwnLoad(prefill_tokens=1500, prefilling=1)
    view = ReplicaView.combine("a", "decode", 256, own, REPORT, then)
    assert view == ReplicaView("a", "decode", 256, 900 + 500, 5 + 2, 0.5, False, 17)
    assert ReplicaView.combine("a", "decode", 256, own, None).prefill_tokens == 900


def test_a_request_that_ended_after_the_report_weighs_no_more() -> None:
    """Else the next turn of a conversation would find its replica busy with the turn before."""
    then = OwnLoad(prefill_tokens=2000, prefilling=3)
    assert ReplicaView.combine("a", "decode", 256, OwnLoad(), REPORT, then).open_requests == 0
    assert ReplicaView.combine("a", "decode", 256, OwnLoad(), REPORT, then).prefill_tokens == 0


def test_the_configuration_names_the_policy() -> None:
    assert policy_from(PolicyConfig(load_weight_tokens=100)) == PrefixAffinityPolicy(PrefixLoadCost(100))
    assert policy_from(PolicyConfig(kind="round_robin")) == RoundRobinPolicy()


views_drawn = st.lists(
    st.builds(
        ReplicaView,
        id=st.sampled_from(REPLICAS),
        role=st.sampled_from(["unified", "decode", "prefill"]),
        matched_tokens=st.integers(0, 8).map(lambda n: n * 256),
        prefill_tokens=st.integers(0, 4).map(lambda n: n * 512),
        open_requests=st.integers(0, 3),
        draining=st.booleans(),
        last_chosen=st.integers(0, 3),
    ),
    max_size=8,
    unique_by=lambda view: view.id,
)


@given(
    views=views_drawn,
    order=st.randoms(use_true_random=False),
    policy=st.sampled_from([AFFINITY, RoundRobinPolicy()]),
)
def test_a_choice_depends_on_the_views_and_not_on_their_order(
    views: list[ReplicaView], order: random.Random, policy: Policy
) -> None:
    choice = policy.choose(REQUEST, views)
    shuffled = list(views)
    order.shuffle(shuffled)
    again = policy.choose(REQUEST, shuffled)
    assert (choice and choice.replica) == (again and again.replica)
    usable = {view.id: view for view in views if not view.draining}
    assert (choice is None) == (not usable)
    if choice is not None:
        best = next(score.cost.total for score in choice.scores if score.replica == choice.replica)
        assert best == min(score.cost.total for score in choice.scores)
        assert choice.replica in usable
        answering = {view.role for view in usable.values()} - {"prefill"}
        assert not answering or usable[choice.replica].role != "prefill"
