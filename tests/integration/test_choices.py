"""Decisions can be taken again from their log, and handle calls choose as HTTP does."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from router.candidates import Candidate
from router.decision_log import replay
from router.errors import ApiError
from router.index import Match, PrefixIndex
from router.policies import Choice, policy_from
from router.recent import RecentPrefixes
from router.remote_choice import RemoteChoices
from tests.integration.in_process import Cluster, prompt, running, until, words

COMPLETIONS = "/v1/completions"


@pytest.fixture
async def warm() -> AsyncIterator[Cluster]:
    """Four replicas that hold different prompts, some of them held twice."""
    async with running(4, prefill_tokens_per_s=200_000.0) as cluster:
        draw = random.Random(3)
        names = [draw.choice("abcdefgh") for _ in range(60)]
        bodies = [prompt(words(draw.randrange(100, 2000), name)) for name in names]
        room = asyncio.Semaphore(12)

        async def ask(body: dict[str, object]) -> None:
            async with room:
                assert (await cluster.http.post(COMPLETIONS, json=body)).status_code == 200

        await asyncio.gather(*map(ask, bodies))
        await until(cluster.at_rest)
        await until(lambda: cluster.router.knows(cluster.nodes))
        yield cluster


async def test_the_policy_chooses_from_a_log_entry_what_it_chose_then(warm: Cluster) -> None:
    log = list(warm.core.log)
    assert len(log) == 60
    assert replay(log, policy_from(warm.core.config.policy)) == [decision.choice for decision in log]
    others = replay(log, policy_from(warm.core.config.policy.model_copy(update={"kind": "round_robin"})))
    assert others != [decision.choice for decision in log]


async def test_handle_calls_choose_as_http_does(warm: Cluster) -> None:
    remote = RemoteChoices(warm.core, warm.router.renderer)
    for name in "abcdefgh":
        await until(warm.at_rest)
        await until(lambda: warm.router.knows(warm.nodes))
        await until(lambda: _reported(warm))
        body = prompt(words(2100, name))
        found = await remote.choose(COMPLETIONS, body)
        assert found is not None
        ticket, chosen = found
        remote.release(ticket)
        answer = await warm.http.post(COMPLETIONS, json=body)
        by_handle, by_http = list(warm.core.log)[-2:]
        assert (by_handle.digest, by_handle.chunks) == (by_http.digest, by_http.chunks)
        assert [_apart_from_time(row) for row in by_handle.candidates] == [
            _apart_from_time(row) for row in by_http.candidates
        ]
        assert by_handle.choice is not None
        if _decisive(by_handle.choice):
            assert answer.headers["x-manta-replica"] == chosen
    policy = policy_from(warm.core.config.policy)
    log = list(warm.core.log)
    assert replay(log, policy) == [decision.choice for decision in log]


async def test_who_asks_again_at_once_comes_back_to_a_replica_that_has_not_yet_said_what_it_holds(
    warm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixIndex, "match", lambda self, keys: Match(len(keys), {}))
    monkeypatch.setattr(RecentPrefixes, "reported", lambda self, replica: None)
    body = prompt(words(2000, "never seen"))
    answers = [await warm.http.post(COMPLETIONS, json=body) for _ in range(5)]
    assert len({answer.headers["x-manta-replica"] for answer in answers}) == 1


def _reported(cluster: Cluster) -> bool:
    """The router's last load reports say what the replicas would say now."""
    loads = {entry.info.id: entry.load for entry in cluster.core.directory}
    return all(
        load is not None and replace(load, seq=0) == node.hosted.load()
        for node in cluster.nodes
        for load in [loads[node.id]]
    )


def _apart_from_time(row: Candidate) -> Candidate:
    """The two decisions stand one after the other: another replica was chosen last, and some have reported since."""
    return replace(row, last_chosen=0, waited_s=0.0, speed={})


def _decisive(choice: Choice) -> bool:
    costs = sorted(score.cost for score in choice.scores)
    return costs[0] < costs[1]


async def test_a_choice_holds_its_place_until_its_ticket_is_given_back(cluster: Cluster) -> None:
    cluster.router.configure(limits={"max_requests_per_replica": 1})
    remote = RemoteChoices(cluster.core, cluster.router.renderer)
    first = await remote.choose(COMPLETIONS, prompt("a"))
    second = await remote.choose(COMPLETIONS, prompt("a"))
    assert first is not None
    assert second is not None
    assert first[1] != second[1]
    assert await remote.choose(COMPLETIONS, prompt("a")) is None
    waiting = asyncio.create_task(cluster.http.post(COMPLETIONS, json=prompt("a")))
    await until(lambda: len(cluster.core.room) == 1)
    remote.release(first[0])
    assert (await waiting).headers["x-manta-replica"] == first[1]
    for ticket in (first[0], second[0], "of-nobody"):
        remote.release(ticket)
    assert len(remote) == 0


async def test_a_choice_may_leave_replicas_out(cluster: Cluster) -> None:
    remote = RemoteChoices(cluster.core, cluster.router.renderer)
    ids = [node.id for node in cluster.nodes]
    found = await remote.choose(COMPLETIONS, prompt("a"), exclude=ids[:1])
    assert found is not None
    assert found[1] == ids[1]
    assert await remote.choose(COMPLETIONS, prompt("a"), exclude=ids) is None
    remote.release(found[0])


async def test_a_bad_body_of_a_handle_call_is_refused_as_over_http(cluster: Cluster) -> None:
    remote = RemoteChoices(cluster.core, cluster.router.renderer)
    with pytest.raises(ApiError) as refused:
        await remote.choose("/v1/chat/completions", {"messages": []})
    answer = await cluster.http.post("/v1/chat/completions", json={"messages": []})
    assert (refused.value.status, refused.value.body()) == (answer.status_code, answer.content)
    assert len(remote) == 0


async def test_a_ticket_that_is_never_given_back_expires(cluster: Cluster) -> None:
    now = 0.0
    remote = RemoteChoices(cluster.core, cluster.router.renderer, clock=lambda: now)
    assert await remote.choose(COMPLETIONS, prompt("a")) is not None
    assert cluster.core.ledger.open_requests() == 1
    now = 3601.0
    found = await remote.choose(COMPLETIONS, prompt("a"))
    assert found is not None
    assert cluster.core.ledger.open_requests() == 1
    remote.release(found[0])
