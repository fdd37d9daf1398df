"""A replica's own server: closed to whoever lacks the secret, honest about the first token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from cache_store.events import FrameReader, Hello, Load, Message, Snapshot
from tests.integration.in_process import MODEL, SECRET, Cluster, chat, running, until
from workers.messages import EVENTS_PATH, LENGTHS_HEADER, SECRET_HEADER, SNAPSHOT_PATH


@pytest.fixture
async def replica(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the secret, of the first replica."""
    headers = {SECRET_HEADER: SECRET}
    async with httpx.AsyncClient(base_url=cluster.nodes[0].url, headers=headers, timeout=10) as http:
        yield http


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/health"),
        ("POST", "/sim/fault"),
        ("GET", EVENTS_PATH),
        ("GET", SNAPSHOT_PATH),
        ("GET", "/no-such-path"),
        ("OPTIONS", "/v1/chat/completions"),
    ],
)
async def test_every_path_is_closed_without_the_secret(cluster: Cluster, method: str, path: str) -> None:
    async with httpx.AsyncClient(base_url=cluster.nodes[0].url) as http:
        for secret in (None, b"", b"wrong", SECRET.encode() + b"x", b"\xff"):
            headers = {} if secret is None else {SECRET_HEADER: secret}
            answer = await http.request(method, path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == 401
    assert cluster.nodes[0].hosted.publisher.subscriptions == 1


@pytest.mark.parametrize(
    "lengths", ["", "x", '"', "-1", "1,", "1000000", "99999999999999999999", "1e3", "\xff"]
)
async def test_lengths_that_do_not_fit_the_body_are_refused(replica: httpx.AsyncClient, lengths: str) -> None:
    headers = {LENGTHS_HEADER: lengths.encode("latin-1")}
    answer = await replica.post("/v1/chat/completions", json=chat("a"), headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"


async def test_the_head_of_a_stream_waits_for_the_first_token() -> None:
    async with running(1, prefill_overhead_s=600.0) as cluster:
        (node,) = cluster.nodes
        headers = {SECRET_HEADER: SECRET}
        async with httpx.AsyncClient(base_url=node.url, headers=headers, timeout=10) as replica:
            body = chat("a", stream=True)
            asking = asyncio.create_task(replica.post("/v1/chat/completions", json=body))
            await until(lambda: node.engine.load().running)
            assert node.hosted.app.open_requests == 1
            # The engine's own head is there already; what is known of the client is that it has none.
            cycle = [c for c in node.server._server.server_state.connections if c.cycle is not None]
            assert not any(c.cycle.response_started for c in cycle if c.cycle.scope["method"] == "POST")
            asking.cancel()


async def test_an_error_has_no_token_to_wait_for(replica: httpx.AsyncClient) -> None:
    answer = await replica.post("/v1/chat/completions", json=chat("a") | {"model": "huge"})
    assert answer.status_code == 404
    assert "x-manta-cached" not in answer.headers


async def test_a_snapshot_and_the_stream_say_the_same(cluster: Cluster, replica: httpx.AsyncClient) -> None:
    await replica.post("/v1/completions", json={"model": MODEL, "prompt": list(range(1000)), "max_tokens": 2})
    snapshot = list(FrameReader().feed((await replica.get(SNAPSHOT_PATH)).content))
    messages: list[Message] = []
    async with replica.stream("GET", EVENTS_PATH) as stream:
        reader = FrameReader()
        async for data in stream.aiter_bytes():
            messages += reader.feed(data)
            if any(isinstance(message, Load) for message in messages):
                break
    assert [type(message) for message in messages[:3]] == [Hello, Snapshot, Load]
    assert messages[:2] == snapshot
    assert isinstance(snapshot[1], Snapshot)
    assert len(snapshot[1].keys) == 15 * 32
    await until(lambda: cluster.nodes[0].hosted.publisher.subscriptions == 1)
