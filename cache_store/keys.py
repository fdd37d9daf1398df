"""Chunk keys: names of KV that are the same in every process on every machine.

    identity  = H(every field of EngineIdentity, labelled)     once per engine
    namespace = H(identity, adapter, salt)                     once per LoRA adapter and tenant
    key[0]    = H(namespace, tokens[0])                        once per chunk
    key[i]    = H(key[i-1], tokens[i])

H is BLAKE3 with 32 bytes of output; each field goes in behind its length as a little-endian uint64; tokens
are little-endian uint32. Nothing else takes part: no environment variable, no hash seed, no clock.

Changing what is hashed here empties every store: raise FORMAT_VERSION when it must be.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from blake3 import blake3

from cache_store.events import KEY_BYTES, ChunkKey

FORMAT_VERSION = 1
TOKEN_BYTES = 4

Tokens = Sequence[int] | bytes | bytearray | memoryview
"""Token ids: any sequence of ints in the range of uint32, or a buffer of uint32. A buffer of bytes is read as
little-endian uint32. Buffers are not copied."""


class EngineIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """All that the KV of one engine depends on, except tokens, adapter and salt.

    Two engines may exchange KV if and only if their identities are equal.

    Mappings hold what JSON can: strings, numbers, booleans, None, lists and mappings of those.
    """

    model: str
    """`id@commit` of the hub, or `local:<hash of the weights>` (`workers.fingerprint`)."""
    kv_dtype: str
    """Type of the KV as stored, never `auto`: `bfloat16`, `fp8_e4m3`, ..."""
    layers: int
    kv_heads: int
    """KV heads of the whole model, before tensor parallelism."""
    head_size: int
    block_tokens: int
    """Tokens per engine block."""
    chunk_tokens: int
    """Tokens per chunk: a whole number of blocks."""
    layout: str
    """How the engine lays out a block's bytes; it names backend and version where they matter."""
    platform: str
    """`cpu` or `cuda`."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    quantization: str = ""
    """Method by which the weights are quantised; empty for none."""
    kv_scales: str = ""
    """Where the scales of a quantised KV come from; unique to the engine where it measures them itself."""
    rope_scaling: dict[str, Any] = {}
    hf_overrides: dict[str, Any] = {}
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.chunk_tokens < 1 or self.chunk_tokens % self.block_tokens:
            raise ValueError(
                f"chunk_tokens is {self.chunk_tokens}; needed: a multiple of the engine's block "
                f"of {self.block_tokens} tokens"
            )

    def digest(self) -> bytes:
        """32 bytes. Raises ValueError for a field whose value JSON can't hold."""
        parts = [b"manta engine identity"]
        for name in sorted(self.__struct_fields__):
            parts += [name.encode(), _canonical(name, getattr(self, name))]
        return _hash(*parts)


def namespace(identity_digest: bytes, adapter: str = "", salt: str = "") -> bytes:
    """32 bytes in which a chain of chunk keys starts.

    `adapter` is the engine's name of a LoRA adapter, `name@contenthash`, empty for the base model. `salt` is
    the tenant's; empty for none.
    """
    return _hash(b"manta namespace", identity_digest, adapter.encode(), salt.encode())


def chunk_keys(namespace: bytes, tokens: Tokens, chunk_tokens: int) -> list[ChunkKey]:
    """Keys of all full chunks of a prompt, in order: len(tokens) // chunk_tokens of them.

    Raises ValueError for tokens that are not uint32.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens}; needed: at least 1")
    data = token_bytes(tokens)
    step = chunk_tokens * TOKEN_BYTES
    before, between = _length(KEY_BYTES), _length(step)
    keys: list[ChunkKey] = []
    key = namespace
    for end in range(step, len(data) + 1, step):
        # One buffer and one call per chunk: half the time of feeding a hasher field by field.
        key = blake3(b"".join((before, key, between, data[end - step : end]))).digest()
        keys.append(ChunkKey(key))
    return keys


def next_key(previous: bytes, tokens: Tokens) -> ChunkKey:
    """Key of the chunk of `tokens`. `previous` is the key before it, or the namespace for the first chunk."""
    return ChunkKey(_hash(previous, token_bytes(tokens)))


def shareable_prefix(n_tokens: int, spans: Iterable[tuple[int, int]]) -> int:
    """How many leading tokens of a prompt stand for KV that they alone determine.

    `spans` are (first token, token count) of what stands in the prompt for something else: images, audio,
    prompt embeddings.
    """
    return min((max(start, 0) for start, count in spans if count > 0 and start < n_tokens), default=n_tokens)


def token_bytes(tokens: Tokens) -> bytes | memoryview:
    """Tokens as little-endian uint32, a view of the caller's buffer where that is what it holds.

    Raises ValueError for what is not a uint32 or not a whole number of them.
    """
    if isinstance(tokens, bytes | bytearray):
        return _whole(memoryview(tokens))
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
    except TypeError:
        return _from_ints(tokens)
    if view.format == "B" and isinstance(tokens, memoryview):
        return _whole(view)
    if sys.byteorder == "little" and view.format == "I" and view.contiguous:
        return view.cast("B")
    return _from_ints(tokens)


def _from_ints(tokens: Iterable[int]) -> bytes:
    try:
        packed = array("I", list(tokens))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _whole(view: memoryview) -> memoryview:
    if view.nbytes % TOKEN_BYTES:
        raise ValueError(f"{view.nbytes} bytes of token ids; needed: a multiple of {TOKEN_BYTES}")
    return view


def _length(n: int) -> bytes:
    return n.to_bytes(8, "little")


def _hash(*fields: bytes | memoryview) -> bytes:
    return blake3(b"".join(part for field in fields for part in (_length(len(field)), field))).digest()


def _canonical(name: str, value: object) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {value!r} can't take part in the KV namespace: {error}") from error
