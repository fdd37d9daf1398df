"""The pure structs that cross between routers and replicas.

A router reaches a replica over the replica's own HTTP server. Every request on that hop carries the cluster's
secret; one whose prompt the router has tokenised carries the client's body unchanged, with the token ids behind it:

    body = client body | prompt 1 as uint32 LE | prompt 2 ... ,   x-manta-prompt-lengths: 812,97

and behind those, where another replica has computed the prompt, the hand-over (`workers.handover`).
"""

from __future__ import annotations

import base64
import binascii
import re
from array import array
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from cache_store.event_endpoint import EVENTS_PATH, SECRET_HEADER, SNAPSHOT_PATH
from cache_store.wire import Source
from workers.handover import (
    FETCH_HEADER,
    HANDOVER_HEADER,
    HANDOVERS_PATH,
    HELD,
    REFUSED,
    Handover,
    HandoverError,
    pack_handover,
    unpack_handover,
)
from workers.transfer import KVLayout, Transfer, why_not

__all__ = [
    "EVENTS_PATH",
    "FETCH_HEADER",
    "HANDOVERS_PATH",
    "HANDOVER_HEADER",
    "HELD",
    "REFUSED",
    "SECRET_HEADER",
    "SNAPSHOT_PATH",
    "Handover",
    "HandoverError",
    "KVLayout",
    "Transfer",
    "pack_handover",
    "unpack_handover",
    "why_not",
]

Role = Literal["unified", "prefill", "decode"]

REQUEST_ID_HEADER = "x-manta-request-id"
LENGTHS_HEADER = "x-manta-prompt-lengths"
"""Tokens of each prompt of the request, comma-separated; their ids follow the client's body."""
SALT_HEADER = "x-manta-cache-salt"
"""The tenant's KV salt, derived by the router; the client's own `cache_salt` never reaches an engine as it is."""
PLAN_HEADER = "x-manta-plan"
"""A `Plan`, msgpack in base64."""
RESERVATION_HEADER = "x-manta-reservation"
"""The `ReservationName` of the place that a router has taken for the request; what comes without came past them."""
CACHED_HEADER = "x-manta-cached"
REPLICA_HEADER = "x-manta-replica"
PREFILL_HEADER = "x-manta-prefill"
"""To a client of a cluster with a prefill pool: the replica that computed the prompt for the one that answered, `local`
where that did it itself as planned, or `fallback=REASON` where it had to."""

DRAIN_PATH = "/manta/drain"
"""PUT: finish what is open and take nothing new. DELETE: take requests again. Both answer a `DrainState` as JSON."""


class ReplicaInfo(msgspec.Struct, frozen=True):
    """Where a replica is and what it serves. Travels through Serve's replica metadata as a plain dict."""

    id: str
    role: Role
    node: str
    """Ray node id, hex."""
    address: str
    """host:port of the replica's own HTTP server."""
    models: tuple[str, ...]
    """Names that clients may ask for: served model names, then LoRA adapters by their public name."""
    adapters: dict[str, str] = {}
    """Public adapter name -> name that the engine knows it by, `name@contenthash`."""
    max_model_len: int = 0
    ranks: int = 1
    """Workers that each hold a part of every chunk."""
    transfer: Transfer | None = None
    """What it can do with other replicas' KV; None for nothing."""
    no_transfer: str = ""
    """Why it can do nothing with it, where that was asked for."""


class Plan(msgspec.Struct, frozen=True):
    """Where the cluster has KV of the prompt. Hints: the engine loads what its node's cache really finds."""

    tenant: str = ""
    """Whose quota the chunks count against."""
    sources: tuple[Source, ...] = ()
    """Chunks that are in other nodes' memory."""
    skip_save: int = 0
    """Leading chunks that the cluster keeps already."""


def pack_plan(plan: Plan) -> str:
    return base64.b64encode(msgspec.msgpack.encode(plan)).decode()


def unpack_plan(header: str) -> Plan:
    """Inverse of `pack_plan`. Raises ValueError."""
    try:
        return _plan_decoder.decode(base64.b64decode(header, validate=True))
    except (binascii.Error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{PLAN_HEADER} is not a plan: {error}") from error


class ReservationName(NamedTuple):
    """A router's reservation, as the replica is told of it. On the wire `ROUTER:NUMBER:TOKENS`."""

    router: str
    """16 hex digits, drawn when the router starts."""
    number: int
    """Counted by that router over all replicas."""
    prefill_tokens: int
    """Prompt tokens that the router expects the replica to compute."""


def pack_reservation(name: ReservationName) -> str:
    return f"{name.router}:{name.number}:{name.prefill_tokens}"


def unpack_reservation(header: str) -> ReservationName:
    """Inverse of `pack_reservation`. Raises ValueError."""
    found = _RESERVATION.fullmatch(header)
    if found is None:
        raise ValueError(f"{RESERVATION_HEADER} is {header[:64]!r}; needed: ROUTER:NUMBER:TOKENS")
    return ReservationName(found[1], int(found[2]), int(found[3]))


_RESERVATION = re.compile(r"([0-9a-f]{16}):([0-9]{1,18}):([0-9]{1,18})")


class DrainState(msgspec.Struct, frozen=True):
    """What a replica says when it is told to drain, or to take requests again."""

    draining: bool
    """Also true after DELETE where it stops anyway, or is sick."""
    open_requests: int


_plan_decoder = msgspec.msgpack.Decoder(Plan)


def pack_prompts(body: bytes, prompts: Sequence[array[int]]) -> tuple[bytes, str]:
    """The body for the internal hop and the value of `LENGTHS_HEADER`. Prompts are arrays of uint32 (typecode "I")."""
    return body + b"".join(p.tobytes() for p in prompts), ",".join(str(len(p)) for p in prompts)


def unpack_prompts(data: bytes, lengths: str) -> tuple[bytes, list[list[int]]]:
    """Inverse of `pack_prompts`. Raises ValueError when the header and the body do not fit."""
    counts = [int(n) for n in lengths.split(",")]
    size = 4 * sum(counts)
    if min(counts) < 0 or size > len(data):
        raise ValueError(
            f"{LENGTHS_HEADER}: {lengths} asks for {size} bytes of token ids, the body has {len(data)}"
        )
    tokens = array("I", data[len(data) - size :])
    prompts, start = [], 0
    for count in counts:
        prompts.append(tokens[start : start + count].tolist())
        start += count
    return data[: len(data) - size], prompts
