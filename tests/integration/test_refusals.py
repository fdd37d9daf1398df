"""Bad input: a 4xx in OpenAI's error shape that says what and where, and nothing reaches an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from router.render import Rendered
from tests.integration.in_process import MODEL, Cluster, chat, words

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(autouse=True)
async def no_work(cluster: Cluster) -> AsyncIterator[None]:
    """What is refused never was at an engine, unless a test says so."""
    yield
    assert sum(node.engine.counters.prompt_tokens for node in cluster.nodes) == 0


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (CHAT, b'{"model": "toy", "messages": [', 400, "not valid JSON"),
        (CHAT, b"", 400, "not valid JSON"),
        (CHAT, b"[]", 400, "found an array"),
        (CHAT, b'{"model": "\xff"}', 400, "UTF-8"),
        (CHAT, b"[" * 100_000, 400, "nested too deeply"),
        (CHAT, b'{"messages": []}', 400, "empty conversation"),
        (CHAT, b'{"messages": "text"}', 400, "messages"),
        (CHAT, b'{"model": "huge", "messages": [{"role": "user", "content": "a"}]}', 404, "`huge`"),
        (
            CHAT,
            b'{"model": "\\ud800", "messages": [{"role": "user", "content": "a"}]}',
            404,
            "does not exist",
        ),
        (COMPLETIONS, b'{"prompt": []}', 400, "non-empty"),
        (COMPLETIONS, b'{"prompt": [-1]}', 400, "token ids from 0"),
        ("/tokenize", b'{"model": "huge", "prompt": "a"}', 404, "`huge`"),
    ],
)
async def test_a_bad_body_is_refused_with_what_is_wrong(
    cluster: Cluster, path: str, body: bytes, status: int, says: str
) -> None:
    answer = await cluster.http.post(path, content=body, headers={"content-type": "application/json"})
    assert says in error_of(answer, status)["message"]


async def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(cluster: Cluster) -> None:
    answer = await cluster.http.post(COMPLETIONS, json={"model": MODEL, "prompt": words(70_000, "long")})
    error = error_of(answer, 400)
    assert "65536" in error["message"]
    assert "70000" in error["message"]


async def test_the_official_client_raises_its_own_errors(cluster: Cluster) -> None:
    async with cluster.openai() as client:
        with pytest.raises(openai.NotFoundError, match="huge"):
            await client.completions.create(model="huge", prompt="a")
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model=MODEL, messages=[])


async def test_a_body_over_the_limit_is_refused_before_it_is_read(cluster: Cluster) -> None:
    cluster.router.configure(limits={"max_body_bytes": 4096})
    answer = await cluster.http.post(COMPLETIONS, content=b"x" * 5000)
    assert "4096" in error_of(answer, 413)["message"]
    assert "5000" in error_of(answer, 413)["message"]


async def test_a_body_of_untold_length_is_cut_off_at_the_limit(cluster: Cluster) -> None:
    cluster.router.configure(limits={"max_body_bytes": 4096})

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 2000

    answer = await cluster.http.post(COMPLETIONS, content=pieces())
    assert "4096" in error_of(answer, 413)["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("POST", "/healthz", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_answered_with_those_allowed(
    cluster: Cluster, method: str, path: str, allowed: str
) -> None:
    answer = await cluster.http.request(method, path)
    error_of(answer, 405)
    assert answer.headers["allow"] == allowed


@pytest.mark.parametrize(
    "path",
    ["/", "/nothing", "/manta/events", "/manta/snapshot", "/sim/fault", "//v1/models", "/%00", "/v2/models"],
)
async def test_paths_that_are_not_for_clients_do_not_exist(cluster: Cluster, path: str) -> None:
    error_of(await cluster.http.get(path), 404)
    error_of(await cluster.http.post(path, json={"fault": "hang"}), 404)
    assert all(node.engine.faults.kind == "none" for node in cluster.nodes)


@pytest.mark.parametrize(
    "target", [b"/v1/../sim/fault", b"/v1/%2e%2e/manta/events", b"/v1/%0d%0aevil:1", b"/v1/\xff"]
)
async def test_no_way_of_writing_a_path_leads_round_the_router(cluster: Cluster, target: bytes) -> None:
    answer = await raw(cluster, b"GET " + target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.split(b" ")[1] in (b"400", b"404")


@pytest.mark.parametrize(
    "header",
    [
        b"authorization: \xff\xfe",
        b"x-request-id: \xc3\xa9\xff",
        b"content-type: \xff",
        b"x-odd: \x80",
        b"cookie: " + b"c" * 20_000,
    ],
)
async def test_odd_header_bytes_are_no_error_of_the_server(cluster: Cluster, header: bytes) -> None:
    request = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + header + b"\r\n\r\n"
    assert (await raw(cluster, request)).startswith(b"HTTP/1.1 200")


async def test_a_get_may_have_a_body_and_another_request_behind_it(cluster: Cluster) -> None:
    first = b"GET /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    last = b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = await raw(cluster, first + last)
    assert answer.count(b"HTTP/1.1 200") == 2


async def test_head_has_no_body(cluster: Cluster) -> None:
    answer = await raw(cluster, b"HEAD /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\n")


async def test_a_fault_of_the_router_is_a_500_in_the_same_shape_and_is_counted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(path: str, body: bytes) -> Rendered:
        raise ZeroDivisionError

    monkeypatch.setattr(cluster.router.renderer, "render", broken)
    error_of(await cluster.http.post(CHAT, json=chat("a")), 500)
    text = (await cluster.http.get("/metrics")).text
    assert 'manta_router_requests_total{path="/v1/chat/completions",status="500"} 1.0' in text


async def raw(cluster: Cluster, request: bytes) -> bytes:
    """The bytes that come back until the router closes the connection."""
    host, _, port = cluster.router.server.addresses[0].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer
