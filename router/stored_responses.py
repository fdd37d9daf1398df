"""Finds the replica that holds a stored response: it lives in the memory of the engine that made it.

Nothing is remembered here. The replicas are asked, so that any router finds what another one placed.
"""

from __future__ import annotations

import asyncio

import aiohttp

from router.directory import Directory, ReplicaEntry
from workers.messages import SALT_HEADER

_PROBE_TIMEOUT_S = 5.0


async def find_holder(directory: Directory, response: str, salt: str, continues: bool) -> str | None:
    """Id of the replica that holds `response` for the tenant of `salt`; None where none does.

    One that drains counts too, unless a request `continues` the response: that is new work.
    """
    entries = directory.ready() if continues else directory.reachable()
    answers = await asyncio.gather(*(_holds(directory, entry, response, salt) for entry in entries))
    return next((entry.info.id for entry, holds in zip(entries, answers, strict=True) if holds), None)


async def _holds(directory: Directory, entry: ReplicaEntry, response: str, salt: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
    try:
        async with directory.ask(entry, f"/v1/responses/{response}", timeout, {SALT_HEADER: salt}) as answer:
            return answer.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
