"""`manta cache warm`: prompts sent to the cluster a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import aiohttp
import msgspec

from cluster.admin import message_of
from cluster.cache_prompts import Failed, Line, Summary
from cluster.cache_target import Target
from router.cache_answers import Warmed

WARM_PATH = "/admin/cache/warm"
_ATTEMPTS = 5
_MAX_RETRY_AFTER_S = 30.0
_BUSY = frozenset({429, 503})


async def warm_all(
    target: Target,
    lines: Iterable[Line],
    summary: Summary,
    concurrency: int,
    on_done: Callable[[], None] = lambda: None,
) -> None:
    """Add to `summary` what comes of every line. Cancelled, it leaves no request behind."""
    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    # The router has limits of its own on every part of a request.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30.0)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        rest = iter(lines)
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(_work(session, target.endpoint, rest, summary, on_done))


async def _work(
    session: aiohttp.ClientSession,
    endpoint: str,
    rest: Iterator[Line],
    summary: Summary,
    on_done: Callable[[], None],
) -> None:
    for line in rest:
        try:
            summary.add(await _warm(session, endpoint, line.body))
        except (aiohttp.ClientError, OSError, msgspec.DecodeError, _Refused) as error:
            summary.failed.append(Failed(line.number, str(error) or type(error).__name__))
        on_done()


class _Refused(Exception):
    pass


async def _warm(session: aiohttp.ClientSession, endpoint: str, body: dict[str, Any]) -> Warmed:
    """Asks again, as long as it is told to wait, a cluster that is busy."""
    data = msgspec.json.encode(body)
    attempt = 0
    while True:
        attempt += 1
        async with session.post(
            endpoint + WARM_PATH, data=data, headers={"content-type": "application/json"}
        ) as answer:
            said = await answer.read()
        if answer.status == 200:
            return msgspec.json.decode(said, type=Warmed)
        if answer.status not in _BUSY or attempt == _ATTEMPTS:
            raise _Refused(f"{answer.status}: {message_of(said)}")
        await asyncio.sleep(_retry_after_s(answer.headers.get("retry-after", "")))


def _retry_after_s(header: str) -> float:
    return min(float(header), _MAX_RETRY_AFTER_S) if header.isdecimal() else 1.0
