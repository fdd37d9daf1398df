"""`/admin/cache/*`: what an operator sees of the stores, and what becomes of what it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from cache_store.events import ChunkKey
from router.config import TenantConfig
from tests.integration.cluster_caches import NBYTES, CachedCluster, running_with_caches
from tests.integration.in_process import (
    CHUNK_TOKENS,
    MODEL,
    Cluster,
    cached_header,
    chat,
    prompt,
    running,
    until,
    words,
)

KEYS = [ChunkKey(bytes([number]) * 32) for number in range(1, 9)]
HEX = [key.hex() for key in KEYS]
LONG = words(4 * CHUNK_TOKENS + 10, "long")
TENANTS = {name: TenantConfig(api_keys=(f"key-of-{name}",)).model_dump() for name in ("red", "blue")}
POSTS = ("lookup", "pin", "unpin", "evict", "warm")


@pytest.fixture
async def cached() -> AsyncIterator[CachedCluster]:
    """Two replicas, and caches of the nodes aa00 and bb00."""
    async with running_with_caches() as cached:
        yield cached


async def get(cached: CachedCluster, page: str) -> httpx.Response:
    return await cached.cluster.http.get(f"/admin/cache/{page}")


async def post(cached: CachedCluster, page: str, **body: Any) -> httpx.Response:
    return await cached.cluster.http.post(f"/admin/cache/{page}", json=body)


async def told(cached: CachedCluster, page: str, **body: Any) -> Any:
    answer = await post(cached, page, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def problem(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


async def in_hbm(cached: CachedCluster, chunks: int) -> list[ChunkKey]:
    """Once the router knows of so many chunks in the replicas' blocks."""
    await until(lambda: len(cached.all_hbm) == chunks)
    return list(cached.all_hbm)


# What there is


async def test_stats_tell_every_node_and_all_together(cached: CachedCluster) -> None:
    one, other = cached.caches
    await one.save(KEYS[:3])
    await other.save(KEYS[2:4])
    found = (await get(cached, "stats")).json()
    assert [node["node"] for node in found["nodes"]] == ["aa00", "bb00"]
    assert [node["tiers"]["dram"]["chunks"] for node in found["nodes"]] == [3, 2]
    assert found["nodes"][0]["tiers"]["disk"] == {
        "chunks": 3, "bytes": 3 * NBYTES, "capacity": 1 << 20, "healthy": True,
    }  # fmt: skip
    assert found["nodes"][1]["counters"]["saves"]["stored"] == 2
    assert found["totals"]["tiers"]["dram"]["chunks"] == 5
    assert found["totals"]["tiers"]["dram"]["capacity"] == 2 << 20
    assert found["totals"]["counters"]["saves"]["stored"] == 5
    assert found["problems"] == {}


async def test_stats_tell_what_the_replicas_hold_themselves(cached: CachedCluster) -> None:
    answer = await cached.cluster.http.post("/v1/completions", json=prompt(LONG))
    await in_hbm(cached, 4)
    assert (await get(cached, "stats")).json()["hbm"][answer.headers["x-manta-replica"]] == 4


async def test_chunks_are_listed_from_all_nodes_or_one(cached: CachedCluster) -> None:
    one, other = cached.caches
    await one.save(KEYS[:3], tenant="red")
    await other.save(KEYS[3:5])
    found = (await get(cached, "ls")).json()
    assert {(chunk["key"], chunk["node"]) for chunk in found["chunks"]} == {
        *((key, "aa00") for key in HEX[:3]), *((key, "bb00") for key in HEX[3:5]),
    }  # fmt: skip
    assert not found["more"]
    idle = [chunk["idle_s"] for chunk in found["chunks"]]
    assert idle == sorted(idle)
    (listed,) = [chunk for chunk in found["chunks"] if chunk["key"] == HEX[0]]
    assert (listed["tiers"], listed["nbytes"], listed["tenant"]) == (
        ["dram", "disk", "remote"],
        NBYTES,
        "red",
    )
    of_one = (await get(cached, "ls?node=bb")).json()["chunks"]
    assert {chunk["key"] for chunk in of_one} == set(HEX[3:5])


@pytest.mark.parametrize(
    ("limit", "listed", "more"), [(1, 1, True), (4, 4, True), (5, 5, False), (10000, 5, False)]
)
async def test_a_listing_has_a_limit_and_says_whether_there_is_more(
    cached: CachedCluster, limit: int, listed: int, more: bool
) -> None:
    await cached.caches[0].save(KEYS[:3])
    await cached.caches[1].save(KEYS[3:5])
    found = (await get(cached, f"ls?limit={limit}")).json()
    assert (len(found["chunks"]), found["more"]) == (listed, more)


@pytest.mark.parametrize(
    ("page", "status", "said"),
    [
        ("ls?limit=0", 400, "limit: found '0'; needed: a number from 1 to 10000"),
        ("ls?limit=10001", 400, "limit: found '10001'"),
        ("ls?limit=all", 400, "limit: found 'all'"),
        ("ls?limit=", 400, "limit: found ''"),
        ("ls?lim=3", 400, "'lim' is no parameter of this page; needed: limit or node"),
        ("stats?node=aa00", 400, "'node' is no parameter of this page"),
        ("ls?node=cc", 404, "No node with a cache is named 'cc'. There are: aa00, bb00."),
    ],
)
async def test_parameters_that_are_none_are_refused(
    cached: CachedCluster, page: str, status: int, said: str
) -> None:
    assert said in problem(await get(cached, page), status)


# Where a prompt's chunks are


async def test_a_prompt_is_looked_up_in_replicas_and_in_every_tier_of_every_node(
    cached: CachedCluster,
) -> None:
    answer = await cached.cluster.http.post("/v1/completions", json=prompt(LONG))
    replica = answer.headers["x-manta-replica"]
    await in_hbm(cached, 4)
    before = await told(cached, "lookup", prompt=LONG, model=MODEL)
    (engines,) = before["engines"]
    assert sorted(engines["replicas"]) == ["replica-0", "replica-1"]
    assert engines["chunk_tokens"] == CHUNK_TOKENS
    keys = [ChunkKey(bytes.fromhex(chunk["key"])) for chunk in engines["chunks"]]
    assert set(keys) == cached.cluster.node(replica).engine.chunks()
    assert [chunk["tokens"] for chunk in engines["chunks"]] == [64, 128, 192, 256]
    assert [chunk["hbm"] for chunk in engines["chunks"]] == [[replica]] * 4
    assert [chunk["dram"] for chunk in engines["chunks"]] == [[]] * 4

    one, other = cached.caches
    await one.save(keys[1:3])
    await other.save(keys[2:3])
    one.store.evict(keys[1:2], ["dram", "remote"])
    found = await told(cached, "lookup", prompt=LONG, model=MODEL)
    chunks = found["engines"][0]["chunks"]
    assert [chunk["dram"] for chunk in chunks] == [[], [], ["aa00", "bb00"], []]
    assert [chunk["disk"] for chunk in chunks] == [[], ["aa00"], ["aa00", "bb00"], []]
    assert [chunk["remote"] for chunk in chunks] == [[], [], ["aa00", "bb00"], []]
    tokens = 4 * CHUNK_TOKENS + 10
    assert (found["prompt_tokens"], found["shareable_tokens"], found["problems"]) == (tokens, tokens, {})


async def test_what_is_covered_is_a_prefix(cached: CachedCluster) -> None:
    (engines,) = (await told(cached, "lookup", prompt=LONG))["engines"]
    keys = [ChunkKey(bytes.fromhex(chunk["key"])) for chunk in engines["chunks"]]
    assert engines["covered_tokens"] == 0
    await cached.caches[0].save([keys[0], keys[3]])
    await cached.caches[1].save([keys[1]])
    (engines,) = (await told(cached, "lookup", prompt=LONG))["engines"]
    assert engines["covered_tokens"] == 2 * CHUNK_TOKENS


@pytest.mark.parametrize("form", ["text", "ids", "chat", "adapter"])
async def test_a_prompt_has_the_chunks_of_the_request_that_it_would_come_with(
    cached: CachedCluster, form: str
) -> None:
    body: dict[str, Any] = {
        "text": prompt(LONG),
        "ids": prompt(list(range(300))),
        "chat": chat(LONG),
        "adapter": prompt(LONG, model="law"),
    }[form]
    path = "/v1/chat/completions" if form == "chat" else "/v1/completions"
    answer = await cached.cluster.http.post(path, json=body)
    assert answer.status_code == 200
    held = await in_hbm(cached, 4)
    named = {name: value for name, value in body.items() if name != "max_tokens"}
    (engines,) = (await told(cached, "lookup", **named))["engines"]
    assert {chunk["key"] for chunk in engines["chunks"]} == {key.hex() for key in held}
    assert engines["covered_tokens"] == 4 * CHUNK_TOKENS
    # The same text for another model is another prompt.
    other = {**named, "model": MODEL if form == "adapter" else "law"}
    assert (await told(cached, "lookup", **other))["engines"][0]["covered_tokens"] == 0


async def test_chunks_can_be_looked_up_by_their_keys(cached: CachedCluster) -> None:
    await cached.caches[1].save(KEYS[:1])
    found = await told(cached, "lookup", keys=HEX[:2])
    (engines,) = found["engines"]
    assert (found["prompt_tokens"], engines["identity"], engines["chunk_tokens"]) == (0, "", 0)
    assert [chunk["dram"] for chunk in engines["chunks"]] == [["bb00"], []]


async def test_a_prompt_that_is_shorter_than_a_chunk_has_none(cached: CachedCluster) -> None:
    found = await told(cached, "lookup", prompt="short")
    assert found["engines"][0]["chunks"] == []
    assert found["prompt_tokens"] == 2


# What is kept and dropped


async def test_a_prompts_chunks_are_pinned_where_they_are_and_then_stay(cached: CachedCluster) -> None:
    (engines,) = (await told(cached, "lookup", prompt=LONG))["engines"]
    keys = [ChunkKey(bytes.fromhex(chunk["key"])) for chunk in engines["chunks"]]
    one, other = cached.caches
    await one.save([*keys, KEYS[0]])
    await other.save(keys[:1])
    assert await told(cached, "pin", prompt=LONG) == {
        "chunks": 4, "nodes": {"aa00": 4, "bb00": 1}, "problems": {},
    }  # fmt: skip
    evicted = await told(cached, "evict", all=True)
    assert evicted == {"chunks": None, "nodes": {"aa00": 1, "bb00": 0}, "problems": {}}
    assert (await told(cached, "unpin", keys=[key.hex() for key in keys[:3]]))["nodes"] == {
        "aa00": 3,
        "bb00": 1,
    }
    assert (await told(cached, "evict", prompt=LONG))["nodes"] == {"aa00": 3, "bb00": 1}
    assert one.store.tiers_of(keys) == [(), (), (), ("dram", "disk", "remote")]


async def test_evicting_a_prompt_touches_nothing_else(cached: CachedCluster) -> None:
    (cache, _) = cached.caches
    await cache.save(KEYS[:3])
    for body in ({"prompt": "too short for a chunk"}, {"prompt": LONG}, {"keys": HEX[5:]}):
        found = await told(cached, "evict", **body)
        assert sum(found["nodes"].values()) == 0
    assert (await told(cached, "pin", prompt="too short")) == {
        "chunks": 0, "nodes": {"aa00": 0, "bb00": 0}, "problems": {},
    }  # fmt: skip
    assert len(cache.store.ls(100)) == 3
    assert (await told(cached, "evict", keys=HEX[:1]))["nodes"] == {"aa00": 1, "bb00": 0}
    assert len(cache.store.ls(100)) == 2


# Tenants


async def test_a_tenants_chunks_are_found_in_its_name_and_in_no_other() -> None:
    async with running_with_caches(router={"tenants": TENANTS}) as cached:
        headers = {"authorization": "Bearer key-of-red"}
        await cached.cluster.http.post("/v1/completions", json=prompt(LONG), headers=headers)
        await in_hbm(cached, 4)
        covered = [
            (await told(cached, "lookup", prompt=LONG, tenant=name))["engines"][0]["covered_tokens"]
            for name in ("red", "blue")
        ]
        assert covered == [4 * CHUNK_TOKENS, 0]
        assert "Tenants: blue, red" in problem(await post(cached, "lookup", prompt=LONG), 400)
        for page in POSTS:
            answer = await post(cached, page, prompt=LONG, tenant="green")
            assert "'green' does not exist" in problem(answer, 404)


async def test_a_prompt_is_warmed_for_one_tenant_alone() -> None:
    async with running_with_caches(1, router={"tenants": TENANTS}) as cached:
        warmed = await told(cached, "warm", prompt=LONG, tenant="red", wait_s=0)
        assert warmed["cached"] == {"hbm": 0}
        await in_hbm(cached, 4)
        found = []
        for name in ("blue", "red"):
            headers = {"authorization": f"Bearer key-of-{name}"}
            answer = await cached.cluster.http.post("/v1/completions", json=prompt(LONG), headers=headers)
            found.append(cached_header(answer)["hbm"])
        assert found[0] == 0
        assert found[1] >= 4 * CHUNK_TOKENS


# Warming


@pytest.mark.parametrize(
    "body", [prompt(LONG), prompt(list(range(300))), chat(LONG), chat(LONG, stream=True)]
)
async def test_warming_computes_a_prompt_and_sees_it_stored(
    cached: CachedCluster, body: dict[str, Any]
) -> None:
    cached.begin_saving()
    first = await told(cached, "warm", **body | {"max_tokens": 500})
    tokens = first["prompt_tokens"]
    assert tokens > 4 * CHUNK_TOKENS
    assert (first["cached"], first["computed"]) == ({"hbm": 0}, tokens)
    assert (first["chunks"], first["stored"]) == (4, 4)
    assert len(cached.caches[0].store.ls(100)) == 4
    # The engine was asked for one token of output, whatever the request said.
    (decision,) = cached.cluster.core.log
    assert decision.request.expected_output_tokens == 1
    second = await told(cached, "warm", **body)
    assert second["replica"] == first["replica"]
    assert second["cached"]["hbm"] == tokens - second["computed"] >= 4 * CHUNK_TOKENS
    assert (second["chunks"], second["stored"]) == (4, 4)


async def test_chunks_that_no_store_took_are_told_after_the_wait(cached: CachedCluster) -> None:
    warmed = await told(cached, "warm", prompt=LONG, wait_s=0.05)
    assert (warmed["chunks"], warmed["stored"]) == (4, 0)
    assert warmed["computed"] == warmed["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": LONG, "model": "none"}, 404, "The model `none` does not exist"),
        ({"prompt": ["a", "b"]}, 400, "prompt: found 2 prompts; needed: one"),
        ({"prompt": ""}, 400, "prompt cannot be empty"),
        ({"prompt": "x" * 300_000}, 400, "maximum context length"),
        ({"messages": []}, 400, "empty conversation"),
        ({}, 400, "exactly one of prompt, messages"),
        ({"prompt": "a", "wait_s": 61}, 400, "wait_s: found 61"),
        ({"prompt": "a", "tenant": 5}, 400, "tenant: found 5"),
        ({"prompt": "a", "tenant": "red"}, 404, "There are none: leave it out."),
        (
            {"prompt": "a", "kv_transfer_params": {"a": 1}},
            400,
            "kv_transfer_params is for the cluster's own use",
        ),
    ],
)
async def test_what_can_not_be_warmed_is_refused_and_reaches_no_replica(
    cached: CachedCluster, body: dict[str, Any], status: int, said: str
) -> None:
    assert said in problem(await post(cached, "warm", **body), status)
    assert len(cached.cluster.core.log) == 0


async def test_a_replica_that_refuses_is_heard_in_its_own_words(cached: CachedCluster) -> None:
    answer = await post(cached, "warm", prompt=LONG, stop=[""])
    assert "stop cannot contain an empty string" in problem(answer, 400)
    direct = await cached.cluster.http.post("/v1/completions", json=prompt(LONG, stop=[""]))
    assert answer.json() == direct.json()


async def test_a_cluster_that_is_full_says_when_to_come_again() -> None:
    limits = {"max_requests_per_replica": 1, "max_queue": 0}
    async with running_with_caches(1, limits=limits, decode_tokens_per_s=20.0) as cached:
        (node,) = cached.cluster.nodes
        asked = cached.cluster.http.post("/v1/completions", json=prompt("long answer", max_tokens=10))
        busy = asyncio.create_task(asked)
        await until(lambda: node.busy)
        refused = await post(cached, "warm", prompt=LONG)
        assert "busy" in problem(refused, 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert (await busy).status_code == 200


async def test_who_leaves_stops_the_engine_that_computes_for_it() -> None:
    async with running_with_caches(1, prefill_tokens_per_s=10.0) as cached:
        (node,) = cached.cluster.nodes
        leaving = asyncio.create_task(post(cached, "warm", prompt=LONG))
        await until(lambda: node.busy)
        leaving.cancel()
        await until(cached.cluster.at_rest)


# What fails


async def test_a_node_that_does_not_answer_is_told_of_and_fails_nothing(cached: CachedCluster) -> None:
    one, other = cached.caches
    await one.save(KEYS[:2])
    await other.stop_answering()
    for page in ("stats", "ls"):
        answer = await get(cached, page)
        assert answer.status_code == 200
        assert list(answer.json()["problems"]) == ["bb00"]
        assert "cache-bb00 did not answer" in answer.json()["problems"]["bb00"]
    assert [node["node"] for node in (await get(cached, "stats")).json()["nodes"]] == ["aa00"]
    found = await told(cached, "lookup", keys=HEX[:1])
    assert found["engines"][0]["chunks"][0]["dram"] == ["aa00"]
    assert list(found["problems"]) == ["bb00"]
    for page in ("pin", "unpin", "evict"):
        changed = await told(cached, page, keys=HEX[:1])
        assert (changed["nodes"], list(changed["problems"])) == ({"aa00": 1}, ["bb00"])


@pytest.mark.parametrize("page", ["stats", "ls", *POSTS])
async def test_without_any_cache_the_answer_says_how_to_get_one(cluster: Cluster, page: str) -> None:
    path = f"/admin/cache/{page}"
    answer = await (
        cluster.http.post(path, json={"prompt": LONG}) if page in POSTS else cluster.http.get(path)
    )
    assert "`cache.share: auto` in the configuration turns it on" in problem(answer, 409)
    assert len(cluster.core.log) == 0


async def test_the_admin_key_opens_every_page_and_nothing_else_does() -> None:
    router = {"admin_key": "open sesame", "tenants": TENANTS}
    async with running(1, router=router) as cluster:
        for page in ("stats", "ls", *POSTS):
            method = "POST" if page in POSTS else "GET"
            for key in (None, "wrong", "key-of-red"):
                headers = {"authorization": f"Bearer {key}"} if key is not None else {}
                refused = await cluster.http.request(
                    method, f"/admin/cache/{page}", json={"prompt": LONG}, headers=headers
                )
                problem(refused, 401)
            opened = await cluster.http.request(
                method, f"/admin/cache/{page}", headers={"authorization": "Bearer open sesame"}
            )
            problem(opened, 409)


@pytest.mark.parametrize("page", POSTS)
async def test_pages_that_change_something_are_not_got_and_need_a_body(
    cached: CachedCluster, page: str
) -> None:
    problem(await get(cached, page), 405)
    for body in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000):
        answer = await cached.cluster.http.post(f"/admin/cache/{page}", content=body)
        problem(answer, 400)


async def test_a_prompt_that_no_engine_has_been_heard_for_has_no_names_yet(cached: CachedCluster) -> None:
    cached.cluster.core.set_pool("unified", [])
    answer = await post(cached, "lookup", prompt=LONG)
    assert "none has been heard yet" in problem(answer, 503)
    assert "retry-after" in answer.headers
