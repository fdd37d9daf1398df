"""Token ids behind a client's body, on the hop from router to replica."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.messages import (
    ReservationName,
    pack_prompts,
    pack_reservation,
    unpack_prompts,
    unpack_reservation,
)

prompts_lists = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=50), min_size=1, max_size=5)


@given(st.binary(max_size=200), prompts_lists)
def test_body_and_prompts_come_back_as_they_were(body: bytes, prompts: list[list[int]]) -> None:
    data, lengths = pack_prompts(body, [array("I", prompt) for prompt in prompts])
    assert unpack_prompts(data, lengths) == (body, prompts)


def test_the_form_on_the_wire_is_pinned() -> None:
    data, lengths = pack_prompts(b"{}", [array("I", [1, 258]), array("I", [2**32 - 1])])
    assert lengths == "2,1"
    assert data == b"{}" + b"\x01\x00\x00\x00" + b"\x02\x01\x00\x00" + b"\xff\xff\xff\xff"


@pytest.mark.parametrize("lengths", ["", "x", "1,", "-1", "-1,2", "3", "1,2", "1.5"])
def test_lengths_that_do_not_fit_the_body_are_refused(lengths: str) -> None:
    with pytest.raises(ValueError):
        unpack_prompts(b"\x00" * 8, lengths)


@given(st.binary(max_size=64), st.text(max_size=20))
def test_garbage_is_refused_or_taken_apart_without_loss(data: bytes, lengths: str) -> None:
    try:
        body, prompts = unpack_prompts(data, lengths)
    except ValueError:
        return
    assert pack_prompts(body, [array("I", prompt) for prompt in prompts])[0] == data


@given(st.from_regex(r"[0-9a-f]{16}", fullmatch=True), st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1))
def test_reservations_come_back_as_they_were(router: str, number: int, tokens: int) -> None:
    name = ReservationName(router, number, tokens)
    assert unpack_reservation(pack_reservation(name)) == name


@pytest.mark.parametrize(
    "header",
    ["", "x", "0123456789abcdef:1", "0123456789abcdef:1:-1", "0123456789ABCDEF:1:1", "0123456789abcdef:1:1:1",
     "0123456789abcdef:1:1\n", "0123456789abcdef:1:" + "9" * 19, "0123456789abcdef:\u0661:1"],
)  # fmt: skip
def test_what_names_no_reservation_is_refused(header: str) -> None:
    with pytest.raises(ValueError, match="ROUTER:NUMBER:TOKENS"):
        unpack_reservation(header)
