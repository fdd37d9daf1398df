"""Several routers in front of the same replicas: each sees what the others have sent, and they choose alike."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from cache_store.events import Load
from router.directory import ReplicaEntry
from router.others_load import OthersLoad
from router.remote_choice import RemoteChoices
from tests.integration.in_process import (
    SECRET,
    Cluster,
    RouterNode,
    cached_header,
    chat,
    http_client,
    prompt,
    running,
    until,
    words,
)
from workers.messages import RESERVATION_HEADER, SECRET_HEADER

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SLOW_PREFILL: dict[str, Any] = {"prefill_overhead_s": 600.0}
SEEN_WITHIN_S = 0.1
OPENING_TOKENS = 3000
"""Of a session. They take longer to compute than a few requests wait for each other."""


@pytest.fixture
async def pair() -> AsyncIterator[Cluster]:
    """Two replicas that never come to a first token, behind two routers."""
    async with running(2, routers=2, **SLOW_PREFILL) as cluster:
        yield cluster


@asynccontextmanager
async def clients(cluster: Cluster) -> AsyncIterator[list[httpx.AsyncClient]]:
    """One per router."""
    https = [http_client(base_url=router.url) for router in cluster.routers]
    try:
        yield https
    finally:
        await asyncio.gather(*(http.aclose() for http in https))


@contextmanager
def asking(http: httpx.AsyncClient, **options: object) -> Iterator[None]:
    """A request that is open meanwhile; its client leaves then."""
    task = asyncio.create_task(http.post(COMPLETIONS, json=prompt(words(300, "ask"), stream=True, **options)))
    try:
        yield
    finally:
        task.cancel()


def entry_of(router: RouterNode, replica: str) -> ReplicaEntry:
    entry = router.core.directory.get(replica)
    assert entry is not None
    return entry


def others(router: RouterNode) -> OthersLoad:
    """Over all replicas."""
    return OthersLoad(*map(sum, zip(*(entry.others for entry in router.core.directory), strict=True)))


def has_reservations(router: RouterNode, count: int) -> bool:
    return router.core.ledger.open_requests() == count


def sees_others(router: RouterNode, requests: int) -> bool:
    return others(router).prefilling == requests


async def test_a_reservation_is_seen_by_the_other_router_within_a_tenth_of_a_second(pair: Cluster) -> None:
    """In the median over many, which a machine that stands still now and then does not move."""
    waits = []
    async with clients(pair) as https:
        for turn in range(40):
            one, other = pair.routers[turn % 2], pair.routers[1 - turn % 2]
            with asking(https[turn % 2]):
                await until(partial(has_reservations, one, 1))
                reserved_at = time.monotonic()
                await until(partial(sees_others, other, 1))
                waits.append(time.monotonic() - reserved_at)
            await until(lambda: pair.at_rest() and not any(map(any, map(others, pair.routers))))
    assert statistics.median(waits) <= SEEN_WITHIN_S, sorted(waits)


async def test_a_routers_own_requests_are_never_others_to_it(pair: Cluster) -> None:
    seen: set[OthersLoad] = set()
    for entry in pair.core.directory:
        take = entry.stream._on_load

        def looked_at(load: Load, first: bool, take: Callable[[Load, bool], None] = take) -> None:
            take(load, first)
            seen.add(others(pair.router))

        entry.stream._on_load = looked_at
    async with clients(pair) as (one, _):
        with asking(one), asking(one), asking(one):
            await until(lambda: others(pair.routers[1]).prefilling == 3)
        await until(lambda: others(pair.routers[1]) == OthersLoad())
    assert seen == {OthersLoad()}


async def test_what_a_client_sends_past_the_routers_counts_for_all_of_them(pair: Cluster) -> None:
    node = pair.nodes[0]
    async with http_client(base_url=node.url, headers={SECRET_HEADER: SECRET}) as http:
        with asking(http):
            await until(
                lambda: all(entry_of(r, node.id).others == OthersLoad(300, 1, 0) for r in pair.routers)
            )


async def test_a_choice_for_a_handle_call_counts_once(pair: Cluster) -> None:
    remote = RemoteChoices(pair.core, pair.router.renderer)
    found = await remote.choose(COMPLETIONS, prompt(words(300, "call")))
    assert found is not None
    ticket, replica = found
    headers = {SECRET_HEADER: SECRET, RESERVATION_HEADER: ticket}
    async with http_client(base_url=pair.node(replica).url, headers=headers) as http:
        with asking(http):
            await until(lambda: entry_of(pair.routers[1], replica).others == OthersLoad(300, 1, 0))
            await until(lambda: entry_of(pair.router, replica).load.http_requests == 1)  # type: ignore[union-attr]
            assert entry_of(pair.router, replica).others == OthersLoad()
            assert pair.core.ledger.load(replica).prefill_tokens == 300
    remote.release(ticket)


async def test_the_share_of_a_router_that_dies_goes_with_its_connections(pair: Cluster) -> None:
    async with clients(pair) as (one, other):
        with asking(one), asking(other), asking(other):
            await until(lambda: others(pair.router).prefilling == 2)
            dead = pair.routers.pop()
            name = dead.core.ledger.router
            await dead.stop()
            await until(lambda: others(pair.router) == OthersLoad())
            shares = [share for node in pair.nodes for share in node.hosted.load().shares]
            assert [share.router for share in shares] == [pair.core.ledger.router]
            assert name != pair.core.ledger.router


async def test_a_prompt_weighs_less_on_both_routers_as_it_is_computed() -> None:
    async with running(1, routers=2, prefill_tokens_per_s=2000.0) as cluster:
        # From here on the engine knows its rate.
        short = await cluster.http.post(COMPLETIONS, json=prompt(words(400, "rate"), max_tokens=1))
        assert short.status_code == 200
        long = asyncio.create_task(cluster.http.post(COMPLETIONS, json=prompt(words(3000, "long"))))
        replica = cluster.nodes[0].id
        await until(lambda: others(cluster.routers[1]).prefill_tokens > 2000)
        await until(lambda: 0 < others(cluster.routers[1]).prefill_tokens < 2000)
        await until(lambda: cluster.core.ledger.load(replica).prefill_tokens < 2000)
        assert (await long).status_code == 200


class Session:
    """A chat whose every turn repeats all that was said."""

    def __init__(self, number: int) -> None:
        self.messages = [{"role": "user", "content": words(OPENING_TOKENS, f"{number:03}")}]
        self.replicas: list[str] = []
        self.prompt_tokens = self.cached_tokens = 0

    async def turn(self, http: httpx.AsyncClient) -> None:
        answer = await http.post(CHAT, json=chat("") | {"messages": self.messages, "max_tokens": 16})
        assert answer.status_code == 200, answer.text
        cached = cached_header(answer)
        self.cached_tokens += cached["hbm"]
        self.prompt_tokens += sum(cached.values())
        self.replicas.append(answer.headers["x-manta-replica"])
        said = answer.json()["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": said})
        self.messages.append({"role": "user", "content": words(40, f"{len(self.messages)}")})


async def talk(https: Sequence[httpx.AsyncClient], sessions: int, turns: int, at_once: int) -> list[Session]:
    """Sessions with pauses between their turns, every turn through the next router."""
    talking = [Session(number) for number in range(sessions)]
    order = [session for session in talking for _ in range(turns)]
    random.Random(3).shuffle(order)
    room, busy = asyncio.Semaphore(at_once), {session: asyncio.Lock() for session in talking}

    async def take_turn(session: Session) -> None:
        async with busy[session], room:
            await session.turn(https[len(session.replicas) % len(https)])

    await asyncio.gather(*map(take_turn, order))
    return talking


async def test_routers_that_take_turns_on_a_session_choose_the_same_replica() -> None:
    async with running(4, routers=2, prefill_tokens_per_s=30_000.0) as cluster, clients(cluster) as https:
        talked = await talk(https, sessions=32, turns=6, at_once=4)
    pairs = [pair for session in talked for pair in itertools.pairwise(session.replicas)]
    same = sum(before == after for before, after in pairs)
    assert same >= 0.95 * len(pairs), f"{same} of {len(pairs)}"
    assert len({replica for session in talked for replica in session.replicas}) == 4


async def test_eight_routers_hit_as_often_as_one_to_a_point_in_a_hundred() -> None:
    async def ratio(routers: int) -> float:
        sim: dict[str, Any] = {"prefill_tokens_per_s": 30_000.0, "blocks": 4096}
        async with running(4, routers=routers, **sim) as cluster, clients(cluster) as https:
            talked = await talk(https, sessions=32, turns=6, at_once=4)
        return sum(each.cached_tokens for each in talked) / sum(each.prompt_tokens for each in talked)

    one, eight = await ratio(1), await ratio(8)
    assert one > 0.5
    assert eight >= one - 0.01


async def test_a_new_router_decides_nothing_before_it_knows_what_the_replicas_hold() -> None:
    async with running(4, prefill_tokens_per_s=30_000.0) as cluster:
        bodies = [prompt(words(OPENING_TOKENS, f"{number:03}")) for number in range(12)]
        first = await asyncio.gather(*(cluster.http.post(COMPLETIONS, json=body) for body in bodies))
        await until(lambda: cluster.router.knows(cluster.nodes))
        new = await cluster.add_router([])
        async with http_client(base_url=new.url) as http:
            asked = [asyncio.create_task(http.post(COMPLETIONS, json=body)) for body in bodies]
            await until(lambda: len(new.core.room) == len(bodies))
            assert (await http.get("/readyz")).status_code == 503
            new.core.set_pool("unified", [node.info for node in cluster.nodes])
            again = await asyncio.gather(*asked)
            assert (await http.get("/readyz")).status_code == 200
        assert min(cached_header(answer)["hbm"] for answer in again) > 0.9 * OPENING_TOKENS
        assert [a.headers["x-manta-replica"] for a in again] == [a.headers["x-manta-replica"] for a in first]


async def test_replicas_of_a_pool_that_is_named_later_are_waited_for() -> None:
    async with running(2) as cluster:
        new = await cluster.add_router([])
        new.core.expect_pools(["unified", "decode"])
        first, second = (node.info for node in cluster.nodes)
        new.core.set_pool("unified", [first])
        entry = entry_of(new, first.id)
        await until(lambda: entry.connected)
        assert new.core.directory.ready() == []
        new.core.set_pool("decode", [second])
        await until(lambda: new.knows(cluster.nodes))


async def test_a_replica_that_says_nothing_holds_a_new_router_up_for_a_moment_only() -> None:
    async with running(2) as cluster:
        silent, other = cluster.nodes
        await silent.silence()
        new = await cluster.add_router()
        async with http_client(base_url=new.url) as http:
            asked = asyncio.create_task(http.post(CHAT, json=chat("hello")))
            await until(lambda: len(new.core.room) == 1)
            assert entry_of(new, other.id).connected or not new.core.directory.settled.is_set()
            answer = await asked
            metrics = (await http.get("/metrics")).text
        assert "manta_router_unheard_at_start 1.0" in metrics
        assert answer.headers["x-manta-replica"] == other.id
        assert new.core.directory.settled.is_set()
