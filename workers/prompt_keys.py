"""Chunk keys of a prompt as an engine sees it: token ids, adapter, salt, and what stands for something else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache_store.events import ChunkKey
from cache_store.keys import chunk_keys, namespace, shareable_prefix


class KeyChain:
    """The keys of one request, longer as more of its tokens become known."""

    def __init__(self, identity: bytes, chunk_tokens: int, adapter: str = "", salt: str = "") -> None:
        """`identity` is the engine identity's digest; `adapter` and `salt` as in `cache_store.keys.namespace`."""
        self.namespace = namespace(identity, adapter, salt)
        self.keys: list[ChunkKey] = []
        self.chunk_tokens = chunk_tokens

    def extend(self, tokens: Sequence[int]) -> list[ChunkKey]:
        """Keys of the chunks that follow those known; `tokens` are theirs, a whole number of chunks.

        Raises ValueError for tokens that are not uint32.
        """
        previous = self.keys[-1] if self.keys else self.namespace
        keys = chunk_keys(previous, tokens, self.chunk_tokens)
        self.keys += keys
        return keys


def shareable_tokens(
    n_tokens: int | None, media: Iterable[tuple[int, int]] = (), embedded: Sequence[bool] | None = None
) -> int | None:
    """How many leading tokens of a request its token ids determine the KV of; None where that is all, to come too.

    `n_tokens` is None for a prompt of embeddings alone. `media`: (first token, count) of what stands for images and
    the like. `embedded`: by position, false where a prompt embedding stands instead of the token; None without any.
    """
    if n_tokens is None:
        return 0
    spans = list(media)
    if embedded is not None and not all(embedded):
        spans.append((list(embedded).index(False), 1))
    end = shareable_prefix(n_tokens, spans)
    return None if end == n_tokens and not spans else end
