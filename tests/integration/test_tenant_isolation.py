"""Tenants: no key, no answer; and nobody meets another's KV."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.config import TenantConfig
from tests.integration.in_process import MODEL, SECRET, Cluster, cached_header, running, until, words
from workers.messages import LENGTHS_HEADER, SALT_HEADER, SECRET_HEADER

TENANTS = {
    "red": TenantConfig(api_keys=("key-of-red", "env:SECOND")).model_dump(),
    "blue": TenantConfig(api_keys=("key-of-blue",)).model_dump(),
}
PROMPT = words(300, "same")


@pytest.fixture
async def shared() -> AsyncIterator[Cluster]:
    """One replica, so that every prompt meets the same cache."""
    async with running(1, router={"tenants": TENANTS}, env={"SECOND": "other-key-of-red"}) as cluster:
        yield cluster


async def ask(cluster: Cluster, key: str | None, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    await until(lambda: cluster.router.knows(cluster.nodes))
    headers = (headers or {}) | ({"authorization": f"Bearer {key}"} if key is not None else {})
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2} | fields
    return await cluster.http.post("/v1/completions", json=body, headers=headers)


@pytest.mark.parametrize("key", [None, "wrong", "key-of-red2"])
async def test_without_a_known_key_there_is_no_answer(shared: Cluster, key: str | None) -> None:
    refused = await ask(shared, key)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert refused.json()["error"]["type"] == "AuthenticationError"
    assert len(shared.core.log) == 0


async def test_every_key_of_a_tenant_shares_its_kv_in_whatever_header_it_comes(shared: Cluster) -> None:
    first = await ask(shared, "key-of-red")
    second = await ask(shared, "other-key-of-red")
    third = await ask(shared, None, {"x-api-key": "key-of-red"})
    assert [cached_header(answer)["hbm"] for answer in (first, second, third)] == [0, 288, 288]


async def test_tenants_with_equal_prompts_never_share(shared: Cluster) -> None:
    assert cached_header(await ask(shared, "key-of-red"))["hbm"] == 0
    await until(lambda: shared.router.knows(shared.nodes))
    (node,) = shared.nodes
    keys_of_red = node.hosted.publisher.keys("hbm")
    assert cached_header(await ask(shared, "key-of-blue"))["hbm"] == 0
    await until(lambda: shared.router.knows(shared.nodes))
    assert len(node.hosted.publisher.keys("hbm")) == 2 * len(keys_of_red) == 8
    # Blue was not even expected to find it: the index tells nothing across tenants.
    assert [d.choice.matched_tokens for d in shared.core.log if d.choice] == [0, 0]
    assert len({decision.digest for decision in shared.core.log}) == 2


async def test_a_salt_of_the_clients_own_separates_further_and_names_no_other_tenant(shared: Cluster) -> None:
    await ask(shared, "key-of-red", cache_salt="mine")
    (content,) = shared.nodes[0].engine.contents
    salts = ["mine", content.salt, ""]
    for salt in salts:
        assert cached_header(await ask(shared, "key-of-blue", cache_salt=salt))["hbm"] == 0
    assert cached_header(await ask(shared, "key-of-red"))["hbm"] == 0
    assert cached_header(await ask(shared, "key-of-red", cache_salt="mine"))["hbm"] == 288
    assert len({content.salt for content in shared.nodes[0].engine.contents}) == 5
    assert not {"mine", ""} & {content.salt for content in shared.nodes[0].engine.contents}


@pytest.mark.parametrize("upper", [False, True])
async def test_headers_of_the_internal_hop_are_not_taken_from_clients(shared: Cluster, upper: bool) -> None:
    await ask(shared, "key-of-red")
    (red,) = shared.nodes[0].engine.contents
    smuggled = {SALT_HEADER: red.salt, LENGTHS_HEADER: "1", SECRET_HEADER: SECRET, "x-manta-cached": "hbm=1"}
    if upper:
        smuggled = {name.upper(): value for name, value in smuggled.items()}
    answer = await ask(shared, "key-of-blue", smuggled)
    assert answer.status_code == 200
    assert cached_header(answer) == {"hbm": 0, "computed": 300}
    # A prompt that the router can't render has no lengths of its own to put over the client's.
    answer = await shared.http.post(
        "/detokenize", json={"model": MODEL, "tokens": [65]}, headers={"x-api-key": "key-of-blue", **smuggled}
    )
    assert answer.json() == {"prompt": "A"}


async def test_the_secret_is_no_key(shared: Cluster) -> None:
    assert (await ask(shared, SECRET)).status_code == 401
    assert (await ask(shared, None, {SECRET_HEADER: SECRET})).status_code == 401


async def test_tenants_change_while_requests_are_served(shared: Cluster) -> None:
    shared.router.configure(tenants={"blue": {"api_keys": ["key-of-blue", "new"]}})
    assert (await ask(shared, "key-of-red")).status_code == 401
    assert (await ask(shared, "new")).status_code == 200
