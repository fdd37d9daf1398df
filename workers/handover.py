"""One prompt's KV on its way from the replica that computed it to the one that answers. Pure.

A router asks one replica for the first half (`HANDOVER_HEADER`): it computes the prompt, keeps the blocks, and answers
with a `Handover`. The router sends that with the second half to another replica, behind the token ids of the body, and
at the end tells the first one that it may forget.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from blake3 import blake3

HANDOVER_HEADER = "x-manta-handover"
"""On a request: compute the prompt and keep its KV under this name. On the answer: `held` with a `Handover` for a body,
or `refused` with the reason; an answer without is the client's own, an error."""
FETCH_HEADER = "x-manta-fetch"
"""The last so many bytes of the body are a `Handover`, to be fetched instead of computing the prompt."""
HANDOVERS_PATH = "/manta/handovers/"
"""DELETE with a name behind: nobody comes for that KV any more."""

HELD, REFUSED = "held", "refused"
_MAX_BYTES = 16 * 1024 * 1024


class Handover(msgspec.Struct, frozen=True):
    """KV of one prompt, kept by the engine that computed it."""

    name: str
    """Given by the router."""
    engine: str
    """`Transfer.engine` of who keeps it."""
    request: str
    """The engine's own name for it."""
    tokens: int
    digest: bytes
    """`prompt_digest` of what was computed."""
    hold_s: float
    """How long it may still be fetched, from when this is received."""
    params: dict[str, Any] = {}
    """For the engine that fetches."""


@dataclass
class FirstHalf:
    """What a replica was asked to compute for another one, and what became of it: one of the two, or neither yet."""

    name: str
    started: bool = False
    handover: Handover | None = None
    refusal: str = ""

    @property
    def done(self) -> bool:
        return self.handover is not None or bool(self.refusal)


@dataclass
class Fetch:
    """KV that a replica may fetch for a request instead of computing it."""

    handover: Handover
    until: float
    """`time.monotonic` of this machine: after that it may be gone, and others' KV in its place."""
    skipped: str = ""
    """Why it was not even tried."""


class HandoverError(ValueError):
    """Bytes that are no hand-over, or a request that can't be one."""


def prompt_digest(adapter: str, tokens: Sequence[int]) -> bytes:
    """16 bytes that tell whether two engines mean the same prompt under the same adapter (its engine name)."""
    name = adapter.encode()
    hashed = blake3(len(name).to_bytes(8, "little") + name)
    hashed.update(array("I", tokens).tobytes())
    return hashed.digest(length=16)


def pack_handover(handover: Handover) -> bytes:
    return msgspec.msgpack.encode(handover)


def unpack_handover(data: bytes) -> Handover:
    """Inverse of `pack_handover`. Raises HandoverError."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandoverError(f"no hand-over: {error}") from error


def split_fetch(body: bytes, length: str) -> tuple[bytes, Handover]:
    """Take the hand-over off a body's end; `length` is the value of FETCH_HEADER. Raises HandoverError."""
    count = int(length) if length.isascii() and length.isdigit() else -1
    if not 0 < count <= min(len(body), _MAX_BYTES):
        raise HandoverError(
            f"{FETCH_HEADER} is {length[:32]!r}; needed: bytes of the body, which has {len(body)}"
        )
    return body[: len(body) - count], unpack_handover(body[len(body) - count :])


_decoder = msgspec.msgpack.Decoder(Handover)
