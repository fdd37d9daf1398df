"""Serving a first half: a hand-over in place of the answer, the client's error as it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from workers.first_half import serve_end, serve_first_half
from workers.handover import FirstHalf, Handover, unpack_handover
from workers.handovers import Handovers

Messages = list[dict[str, Any]]
SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions"}


class Serving:
    def __init__(self) -> None:
        self.released: list[str] = []
        self.sent: Messages = []
        self.handovers = Handovers(self.release)
        self.half = self.handovers.begin("one")

    async def release(self, handover: Handover) -> None:
        self.released.append(handover.name)

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def serve(self, says: Callable[[FirstHalf, Any], Awaitable[None]]) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await says(self.half, send)

        async def receive() -> Any:
            raise AssertionError("nothing is read")

        await serve_first_half(app, SCOPE, receive, self.send, self.half, self.handovers)  # type: ignore[arg-type]

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def outcome(self) -> str | None:
        found = dict(self.sent[0]["headers"]).get(b"x-manta-handover")
        return found.decode() if found is not None else None

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


HANDOVER = Handover("one", "e", "r", 3, b"", 30.0, {"a": 1})


async def whole(send: Any, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def test_the_answer_is_the_hand_over_and_not_what_was_generated() -> None:
    async def says(half: FirstHalf, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: role", "more_body": True})
        half.handover = HANDOVER
        await send({"type": "http.response.body", "body": b"data: token"})

    serving = Serving()
    await serving.serve(says)
    assert (serving.status, serving.outcome) == (200, "held")
    assert unpack_handover(serving.body) == HANDOVER
    assert len(serving.handovers) == 1


async def test_an_application_that_misses_what_it_wanted_generated_does_no_harm() -> None:
    async def says(half: FirstHalf, send: Any) -> None:
        half.handover = HANDOVER
        raise IndexError("choices[1]")

    serving = Serving()
    await serving.serve(says)
    assert serving.outcome == "held"


async def test_a_client_s_error_is_passed_on_as_it_is() -> None:
    serving = Serving()
    await serving.serve(lambda half, send: whole(send, 400, b'{"error":{}}'))
    assert (serving.status, serving.outcome, serving.body) == (400, None, b'{"error":{}}')
    assert len(serving.handovers) == 0


async def test_a_refusal_says_why() -> None:
    async def says(half: FirstHalf, send: Any) -> None:
        half.refusal = "it has several prompts"
        raise ValueError(half.refusal)

    serving = Serving()
    await serving.serve(says)
    assert (serving.status, serving.outcome, serving.body) == (409, "refused", b"it has several prompts")
    assert len(serving.handovers) == 0


async def test_a_failure_before_the_prompt_is_computed_is_one() -> None:
    async def says(half: FirstHalf, send: Any) -> None:
        raise RuntimeError("the engine is dead")

    serving = Serving()
    with pytest.raises(RuntimeError, match="dead"):
        await serving.serve(says)
    assert (serving.sent, len(serving.handovers)) == ([], 0)


async def test_who_gave_up_meanwhile_leaves_nothing_kept() -> None:
    async def says(half: FirstHalf, send: Any) -> None:
        assert await serving.handovers.end("one")
        half.handover = HANDOVER

    serving = Serving()
    await serving.serve(says)
    assert (serving.released, len(serving.handovers)) == (["one"], 0)


async def test_an_end_frees_what_is_kept() -> None:
    serving = Serving()
    serving.half.handover = HANDOVER
    await serving.handovers.computed(serving.half)
    scope = {"method": "DELETE", "path": "/manta/handovers/one", "query_string": b""}
    await serve_end(serving.handovers, scope, serving.send)
    assert (serving.status, serving.released) == (200, ["one"])
    serving.sent.clear()
    await serve_end(serving.handovers, scope, serving.send)
    assert serving.status == 404
    serving.sent.clear()
    await serve_end(serving.handovers, scope | {"method": "GET"}, serving.send)
    assert serving.status == 405
