"""Where a chunk part lies on disk and remote: the one place that knows the path format.

    <root>/<first 16 hex digits of the identity>/<first 2 of the key>/<key, 64 digits>.<rank>.kv

The key alone names the content; the folder of the identity lets people drop what one model left.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from cache_store.events import ChunkKey

IDENTITY_PREFIX_BYTES = 8
_FOLDER = re.compile(r"[0-9a-f]{16}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_PART = re.compile(r"([0-9a-f]{64})\.(0|[1-9][0-9]{0,4})\.kv")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.\d{1,5}\.kv\.[0-9a-f]{8}\.tmp|probe\.[0-9a-f]{8}\.tmp")


class PartPath(NamedTuple):
    """What a path says of the part in it."""

    identity: bytes
    """The first IDENTITY_PREFIX_BYTES of the identity digest."""
    key: ChunkKey
    rank: int

    @property
    def folder(self) -> str:
        return f"{self.identity.hex()}/{self.key.hex()[:2]}"

    def __str__(self) -> str:
        """Relative to the tier's root."""
        return f"{self.folder}/{self.key.hex()}.{self.rank}.kv"


class Stored(NamedTuple):
    """A part that a tier has, as found in its listing."""

    identity: bytes
    """Digest of the engine identity; its first IDENTITY_PREFIX_BYTES where only the path was read."""
    key: ChunkKey
    rank: int
    world_size: int
    """0 where only the path was read."""
    nbytes: int
    """Payload bytes; those of the file where only the path was read."""
    file_bytes: int
    created: float
    """Seconds since the epoch."""
    cost_s: float = 0.0
    tenant: str = ""


def part_path(identity: bytes, key: bytes, rank: int) -> PartPath:
    """`identity` is the whole digest, or what a listing gave of it."""
    return PartPath(identity[:IDENTITY_PREFIX_BYTES], ChunkKey(key), rank)


def parse_path(path: str) -> PartPath | None:
    """None for a path (relative to the root) that `part_path` would not have made."""
    folder, _, name = path.rpartition("/")
    found = _PART.fullmatch(name)
    if not found:
        return None
    part = PartPath(bytes.fromhex(folder[:16]) if is_identity_folder(folder[:16]) else b"", *_named(found))
    return part if str(part) == path else None


def is_identity_folder(name: str) -> bool:
    return _FOLDER.fullmatch(name) is not None


def is_shard(name: str) -> bool:
    """Whether a folder below an identity's is one that holds parts."""
    return _SHARD.fullmatch(name) is not None


def temporary_name(name: str) -> str:
    """Under which `name` is written until it is complete; another one on each call."""
    return f"{name}.{secrets.token_hex(4)}.tmp"


def is_temporary(name: str) -> bool:
    """Whether `temporary_name` may have made this file name, for a part or a probe."""
    return _TEMPORARY.fullmatch(name) is not None


def _named(found: re.Match[str]) -> tuple[ChunkKey, int]:
    return ChunkKey(bytes.fromhex(found[1])), int(found[2])
