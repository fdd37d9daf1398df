"""Hand-overs as bytes, and what tells that two engines mean the same prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.handover import (
    Handover,
    HandoverError,
    pack_handover,
    prompt_digest,
    split_fetch,
    unpack_handover,
)

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
HANDOVER = Handover("n", "e", "r", 3, b"d" * 16, 30.0, {"remote_block_ids": [[1, 2]], "remote_host": "h"})


@given(st.binary(max_size=200), st.text(max_size=20), st.integers(0, 10**6))
def test_body_and_hand_over_come_apart_as_they_went_together(body: bytes, name: str, tokens: int) -> None:
    handover = Handover(name, "e", "r", tokens, b"", 1.5, {"remote_block_ids": [[tokens]]})
    packed = pack_handover(handover)
    assert split_fetch(body + packed, str(len(packed))) == (body, handover)


@pytest.mark.parametrize("length", ["", "0", "-1", "1e3", "²", "999999999999999999999", "12"])
def test_a_length_that_does_not_fit_the_body_is_refused(length: str) -> None:
    with pytest.raises(HandoverError):
        split_fetch(b"eleven byte", length)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x90", pack_handover(HANDOVER)[:-1], b"{}"])
def test_bytes_that_are_no_hand_over_are_refused(data: bytes) -> None:
    with pytest.raises(HandoverError):
        unpack_handover(data)


@given(TOKENS, TOKENS, st.text(max_size=8), st.text(max_size=8))
def test_only_the_same_prompt_under_the_same_adapter_has_the_same_digest(
    one: list[int], other: list[int], adapter: str, another: str
) -> None:
    assert (prompt_digest(adapter, one) == prompt_digest(another, other)) == (
        (adapter, one) == (another, other)
    )
