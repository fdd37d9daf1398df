"""A stored response is its tenant's alone, whatever vLLM's store would give."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from workers.request_record import RequestRecord, current_request
from workers.stored_responses import ResponseGuard


class Store:
    """vLLM's store in small: gives any response to anybody."""

    def __init__(self) -> None:
        self.made = 0
        self.bodies: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"] == "/v1/responses":
            body = b""
            while True:
                message = await receive()
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
            self.bodies.append(json.loads(body))
            self.made += 1
            answer = {"id": f"resp_{self.made}", "object": "response"}
        else:
            answer = {"id": scope["path"].rsplit("/", 1)[-1], "object": "response"}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def guard(store: Store) -> ResponseGuard:
    return ResponseGuard(store, max_owners=3)


async def ask(guard: ResponseGuard, method: str, path: str, salt: str, body: Any = None) -> httpx.Response:
    token = current_request.set(RequestRecord("r", salt=salt))
    try:
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            return await client.request(method, path, json=body)
    finally:
        current_request.reset(token)


async def create(guard: ResponseGuard, salt: str, **body: Any) -> httpx.Response:
    return await ask(guard, "POST", "/v1/responses", salt, {"input": "hi", **body})


async def test_who_made_a_response_can_get_cancel_and_continue_it(guard: ResponseGuard, store: Store) -> None:
    made = (await create(guard, "mine")).json()["id"]
    assert (await ask(guard, "GET", f"/v1/responses/{made}", "mine")).status_code == 200
    assert (await ask(guard, "POST", f"/v1/responses/{made}/cancel", "mine")).status_code == 200
    assert (await create(guard, "mine", previous_response_id=made)).status_code == 200
    assert store.bodies[-1] == {"input": "hi", "previous_response_id": made}


async def test_to_another_tenant_a_response_does_not_exist(guard: ResponseGuard, store: Store) -> None:
    made = (await create(guard, "mine")).json()["id"]
    refused = [
        await ask(guard, "GET", f"/v1/responses/{made}", "other"),
        await ask(guard, "GET", f"/v1/responses/{made}", ""),
        await ask(guard, "POST", f"/v1/responses/{made}/cancel", "other"),
        await create(guard, "other", previous_response_id=made),
    ]
    assert [answer.status_code for answer in refused] == [404] * 4
    assert all(made in answer.json()["error"]["message"] for answer in refused)
    assert len(store.bodies) == 1


@pytest.mark.parametrize("background", [1, "true", {}, [], None, 0.5])
async def test_no_odd_value_elsewhere_opens_a_response_of_another_tenant(
    guard: ResponseGuard, store: Store, background: Any
) -> None:
    made = (await create(guard, "mine")).json()["id"]
    refused = await create(guard, "other", previous_response_id=made, background=background)
    assert refused.status_code == 404
    assert len(store.bodies) == 1


@pytest.mark.parametrize("path", ["/v1/responses/", "/v1/responses/x/y", "/v1/responses/x/cancel/z"])
async def test_odd_paths_below_responses_are_not_found(guard: ResponseGuard, path: str) -> None:
    assert (await ask(guard, "GET", path, "")).status_code == 404


async def test_owners_are_bounded_and_the_forgotten_own_nothing(guard: ResponseGuard) -> None:
    made = [(await create(guard, "mine")).json()["id"] for _ in range(4)]
    status = [(await ask(guard, "GET", f"/v1/responses/{each}", "mine")).status_code for each in made]
    assert status == [404, 200, 200, 200]


async def test_other_paths_pass_untouched(guard: ResponseGuard) -> None:
    assert (await ask(guard, "GET", "/v1/models", "any")).json()["id"] == "models"


async def test_a_body_that_is_no_json_is_left_to_the_server(guard: ResponseGuard, store: Store) -> None:
    transport = httpx.ASGITransport(guard, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
        with pytest.raises(json.JSONDecodeError):
            await client.post("/v1/responses", content=b"{")
