"""What an engine tells its replica of the prompts that it has still to compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_vllm_features import Started, started
from workers.messages import ReservationName
from workers.open_requests import OpenRequests
from workers.request_record import RequestRecord, current_request

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

ROUTER = "a" * 16


async def most_to_compute(engine: Started, name: ReservationName | None) -> int:
    """Tokens, while a request of 300 and 200 tokens is answered; none may be left at its end."""
    told: list[tuple[int, int]] = []
    account = OpenRequests(lambda: told.append(account.counts()[1:3]))
    token = current_request.set(RequestRecord("r", opened=account.open(name)))
    try:
        await engine.complete([[*range(3, 303)], [*range(202, 2, -1)]], max_tokens=3)
    finally:
        current_request.reset(token)
    assert told[-1] == (0, 0)
    assert account.counts()[:3] == (1, 0, 0)
    account.check_integrity()
    return max(tokens for _, tokens in told)


async def test_a_prompt_counts_until_its_first_output(tiny_model: Path) -> None:
    """Whole, where nobody knows better; else without what the router knows to be cached."""
    async with started(tiny_model) as engine:
        assert await most_to_compute(engine, None) == 300 + 200
        assert await most_to_compute(engine, ReservationName(ROUTER, 1, 120)) == 120
