"""A replica's own server: closed to whoever lacks the secret, honest about the first token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from cache_store import events
from cache_store.app_server import AppServer, bound_socket
from cache_store.events import FrameReader, Hello, Load, Snapshot
from tests.integration.in_process import MODEL, SECRET, Cluster, chat, http_client, until
from workers.http import ReplicaApp
from workers.messages import EVENTS_PATH, LENGTHS_HEADER, RESERVATION_HEADER, SECRET_HEADER, SNAPSHOT_PATH
from workers.request_record import current_request


@pytest.fixture
async def replica(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """A client with the secret, of the first replica."""
    headers = {SECRET_HEADER: SECRET}
    async with http_client(base_url=cluster.nodes[0].url, headers=headers) as http:
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
    async with http_client(base_url=cluster.nodes[0].url) as http:
        for secret in (None, b"", b"wrong", SECRET.encode() + b"x", b"\xff"):
            headers = {} if secret is None else {SECRET_HEADER.encode(): secret}
            answer = await http.request(method, path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == 401
    assert cluster.nodes[0].hosted.publisher.subscriptions == 1


@pytest.mark.parametrize(
    "lengths", ["", "x", '"', "-1", "1,", "1000000", "99999999999999999999", "1e3", "\xff"]
)
async def test_lengths_that_do_not_fit_the_body_are_refused(replica: httpx.AsyncClient, lengths: str) -> None:
    headers = {LENGTHS_HEADER.encode(): lengths.encode("latin-1")}
    answer = await replica.post("/v1/chat/completions", json=chat("a"), headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"


async def test_a_reservation_that_no_router_would_name_is_refused(
    cluster: Cluster, replica: httpx.AsyncClient
) -> None:
    answer = await replica.post(
        "/v1/chat/completions", json=chat("a"), headers={RESERVATION_HEADER: "someone:1:1"}
    )
    assert answer.status_code == 400
    assert RESERVATION_HEADER in answer.json()["error"]["message"]
    assert cluster.nodes[0].hosted.load().http_requests == 0


class EarlyHead:
    """An engine that, as vLLM does, sends head and role before there is a token."""

    def __init__(self) -> None:
        self.token = asyncio.Event()
        self.sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"role ", "more_body": True})
        self.sent = 2
        await self.token.wait()
        record = current_request.get()
        assert record is not None
        record.note_first_output(prompt_tokens=10, cached_tokens=4)
        await send({"type": "http.response.body", "body": b"token ", "more_body": True})
        await send({"type": "http.response.body", "body": b"end", "more_body": False})


async def test_the_head_of_a_stream_waits_for_the_first_token_and_tells_what_was_cached(
    cluster: Cluster,
) -> None:
    inner, sent = EarlyHead(), list[Message]()
    app = ReplicaApp(inner, cluster.nodes[0].hosted.publisher, SECRET)

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/", "method": "POST", "headers": [(b"x-manta-secret", SECRET.encode())]}
    serving = asyncio.create_task(app(scope, receive, send))
    await until(lambda: inner.sent == 2)
    assert sent == []
    assert app.open_requests == 1
    inner.token.set()
    await serving
    assert sent[0]["headers"] == [(b"x-manta-cached", b"hbm=4,computed=6")]
    assert b"".join(message["body"] for message in sent[1:]) == b"role token end"
    assert app.open_requests == 0
    assert app.idle.is_set()


async def test_an_error_has_no_token_to_wait_for(replica: httpx.AsyncClient) -> None:
    answer = await replica.post("/v1/chat/completions", json=chat("a") | {"model": "huge"})
    assert answer.status_code == 404
    assert "x-manta-cached" not in answer.headers


async def test_a_snapshot_and_the_stream_say_the_same(cluster: Cluster, replica: httpx.AsyncClient) -> None:
    await replica.post("/v1/completions", json={"model": MODEL, "prompt": list(range(1000)), "max_tokens": 2})
    snapshot = list(FrameReader().feed((await replica.get(SNAPSHOT_PATH)).content))
    messages: list[events.Message] = []
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


async def test_one_server_hosts_several_replicas_each_at_its_own_port(cluster: Cluster) -> None:
    hosted = [node.hosted for node in cluster.nodes]
    server = AppServer([each.app for each in hosted], [bound_socket("127.0.0.1") for _ in hosted])
    await server.start()
    async with http_client(headers={SECRET_HEADER: SECRET}) as http:
        for each, address in zip(hosted, server.addresses, strict=True):
            snapshot = await http.get(f"http://{address}{SNAPSHOT_PATH}")
            assert next(FrameReader().feed(snapshot.content)) == each.publisher.hello
    assert not server.stopped
    await server.stop()
    assert server.stopped
    async with http_client() as http:
        for address in server.addresses:
            with pytest.raises(httpx.ConnectError):
                await http.get(f"http://{address}/health")
