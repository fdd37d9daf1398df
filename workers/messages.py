"""The pure structs that cross between routers and replicas.

A router reaches a replica over the replica's own HTTP server. Every request on that hop carries the cluster's
secret; one whose prompt the router has tokenised carries the client's body unchanged, with the token ids behind it:

    body = client body | prompt 1 as uint32 LE | prompt 2 ... ,   x-manta-prompt-lengths: 812,97
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

from cache_store.event_endpoint import EVENTS_PATH, SECRET_HEADER, SNAPSHOT_PATH
from cache_store.wire import Source

__all__ = ["EVENTS_PATH", "SECRET_HEADER", "SNAPSHOT_PATH"]

Role = Literal["unified", "prefill", "decode"]

REQUEST_ID_HEADER = "x-manta-request-id"
LENGTHS_HEADER = "x-manta-prompt-lengths"
"""Tokens of each prompt of the request, comma-separated; their ids follow the client's body."""
SALT_HEADER = "x-manta-cache-salt"
"""The tenant's KV salt, derived by the router; the client's own `cache_salt` never reaches an engine as it is."""
PLAN_HEADER = "x-manta-plan"
"""A `Plan`, msgpack in base64."""
CACHED_HEADER = "x-manta-cached"
REPLICA_HEADER = "x-manta-replica"

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
