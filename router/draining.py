"""`/admin/replicas/drain`: replicas that an operator takes out of service, and brings back.

The replica keeps that state and tells it to every router in its load report, so that it is the same at all of them and
outlives a router. A replica that drains goes on being healthy: Serve keeps it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from router import errors
from router.directory import Directory, ReplicaEntry
from router.errors import ApiError
from workers.messages import DRAIN_PATH, DrainState, ReplicaInfo

_TIMEOUT_S = 5.0
_NAMES_SHOWN = 12


class DrainRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of the request."""

    name: str
    """A replica's id or address, or a node's id or address; ids may be cut short while they name one thing."""
    undo: bool = False
    force: bool = False
    """Also when no replica is left to take requests."""


class _Told(NamedTuple):
    """What came of telling one replica."""

    info: ReplicaInfo
    state: DrainState | None
    problem: str = ""


async def drain(directory: Directory, body: bytes) -> list[dict[str, Any]]:
    """Tell the named replicas. Returns one map for each, when all have heard.

    Raises ApiError: 400 for a body that is none, 404 and 409 for a name of nothing and of several things, 409 where
    nobody would be left, 502 when a replica could not be told; asking again is right then.
    """
    request = _parsed(body)
    named = resolve(request.name, [entry.info for entry in directory])
    ids = {info.id for info in named}
    left = [entry for entry in directory.ready() if entry.info.id not in ids]
    if not (request.undo or request.force or left):
        raise _conflict(
            f"No replica would be left to take requests: {_list(ids)} is all that is ready. Start others first, or "
            "force it: requests then wait, and fail when they have waited too long."
        )
    method = "DELETE" if request.undo else "PUT"
    entries = [entry for entry in directory if entry.info.id in ids]
    told = await asyncio.gather(*(_tell(directory, entry, method) for entry in entries))
    if failed := [each for each in told if each.state is None]:
        raise _not_told(told, failed)
    return [
        {
            "id": each.info.id,
            "node": each.info.node,
            "address": each.info.address,
            "draining": each.state.draining,
            "open_requests": each.state.open_requests,
        }
        for each in told
        if each.state is not None
    ]


def resolve(name: str, replicas: Sequence[ReplicaInfo]) -> list[ReplicaInfo]:
    """The replicas that `name` names: one, or all of a node. Whole names come before beginnings of ids.

    Raises ApiError 404 naming what there is, and 409 for the beginning of several ids.
    """
    whole = [info for info in replicas if name in (info.id, info.address)]
    whole = whole or [info for info in replicas if name in (info.node, _host(info.address))]
    if whole:
        return whole
    ids = {info.id for info in replicas if name and info.id.startswith(name)}
    nodes = {info.node for info in replicas if name and info.node.startswith(name)}
    if len(ids) + len(nodes) > 1:
        raise _conflict(f"{name!r} is the beginning of several names: {_list(ids | nodes)}.")
    if not ids and not nodes:
        raise _unknown(name, replicas)
    return [info for info in replicas if info.id in ids or info.node in nodes]


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _parsed(body: bytes) -> DrainRequest:
    try:
        return msgspec.json.decode(body, type=DrainRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.malformed_json(str(error)) from error


async def _tell(directory: Directory, entry: ReplicaEntry, method: str) -> _Told:
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with directory.ask(entry, DRAIN_PATH, timeout, method=method) as answer:
            answer.raise_for_status()
            return _Told(entry.info, msgspec.json.decode(await answer.read(), type=DrainState))
    except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
        return _Told(entry.info, None, str(error) or type(error).__name__)


def _unknown(name: str, replicas: Sequence[ReplicaInfo]) -> ApiError:
    ids = {info.id for info in replicas}
    nodes = {f"{info.node} ({_host(info.address)})" for info in replicas}
    there = (
        f"Replicas: {_list(ids)}. Nodes with replicas: {_list(nodes)}." if ids else "There are no replicas."
    )
    return ApiError(
        404, f"No replica, and no node with one, is named {name!r:.200}. {there}", "NotFoundError"
    )


def _conflict(message: str) -> ApiError:
    return ApiError(409, message, "ConflictError")


def _not_told(told: Iterable[_Told], failed: Sequence[_Told]) -> ApiError:
    problems = "; ".join(f"{each.info.id}: {each.problem}" for each in failed)
    done = [each.info.id for each in told if each.state is not None]
    others = f" {_list(done)} did as told." if done else ""
    return ApiError(
        502,
        f"{len(failed)} of {len(done) + len(failed)} replicas could not be told: {problems}.{others}",
        "BadGatewayError",
    )


def _list(names: Iterable[str]) -> str:
    """So many that a person reads them."""
    known = sorted(names)
    more = f" and {len(known) - _NAMES_SHOWN} more" if len(known) > _NAMES_SHOWN else ""
    return ", ".join(known[:_NAMES_SHOWN]) + more
