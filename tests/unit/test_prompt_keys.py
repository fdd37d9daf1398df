"""Chunk keys of a request: the same as the router's, growing as its tokens do, and ending at what tokens do not say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_store.keys import chunk_keys, namespace
from workers.prompt_keys import KeyChain, shareable_tokens

IDENTITY = bytes(32)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=24, max_size=24), st.lists(st.integers(1, 3), max_size=6))
def test_a_chain_that_grows_piece_by_piece_has_the_keys_of_the_whole_prompt(
    tokens: list[int], pieces: list[int]
) -> None:
    chain, start = KeyChain(IDENTITY, 4, "adapter@1", "salt"), 0
    for chunks in [*pieces, 6]:
        piece = tokens[start : start + 4 * chunks]
        assert chain.extend(piece) == chain.keys[start // 4 :]
        start += len(piece)
    assert chain.keys == chunk_keys(namespace(IDENTITY, "adapter@1", "salt"), tokens, 4)


def test_adapter_and_salt_part_chains() -> None:
    chains = [KeyChain(IDENTITY, 2, *names) for names in (("", ""), ("a@1", ""), ("a@2", ""), ("", "a@1"))]
    assert len({chain.extend([1, 2])[0] for chain in chains}) == 4


def test_tokens_that_are_no_uint32_are_refused() -> None:
    with pytest.raises(ValueError, match="token ids"):
        KeyChain(IDENTITY, 2).extend([1, -1])


@pytest.mark.parametrize(
    ("tokens", "media", "embedded", "shareable"),
    [
        (10, [], None, None),
        (10, [(4, 3), (8, 1)], None, 4),
        (10, [(0, 1)], None, 0),
        (10, [], [True] * 10, None),
        (10, [], [True] * 6 + [False] * 4, 6),
        (10, [(7, 2)], [True] * 6 + [False] * 4, 6),
        (None, [], None, 0),
    ],
)
def test_sharing_ends_where_something_stands_for_something_else(
    tokens: int | None, media: list[tuple[int, int]], embedded: list[bool] | None, shareable: int | None
) -> None:
    assert shareable_tokens(tokens, media, embedded) == shareable
