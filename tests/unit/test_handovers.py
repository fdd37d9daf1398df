"""What a replica keeps for others: freed when it is ended or in time, whichever way things interleave."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.handover import FirstHalf, Handover, HandoverError
from workers.handovers import Handovers

HOLD_S = 30.0


class Kept:
    """An engine that keeps blocks, a clock, and the account."""

    def __init__(self) -> None:
        self.now = 0.0
        self.released: list[str] = []
        self.handovers = Handovers(self.release, lambda: self.now)

    async def release(self, handover: Handover) -> None:
        self.released.append(handover.name)

    def begin(self, name: str = "one") -> FirstHalf:
        return self.handovers.begin(name)

    async def computed(self, half: FirstHalf) -> None:
        half.handover = Handover(half.name, "e", f"engine-{half.name}", 3, b"", HOLD_S)
        await self.handovers.computed(half)


async def test_what_is_ended_is_freed_once() -> None:
    kept = Kept()
    await kept.computed(kept.begin())
    assert len(kept.handovers) == 1
    assert await kept.handovers.end("one")
    assert not await kept.handovers.end("one")
    assert (kept.released, len(kept.handovers)) == (["one"], 0)


async def test_what_was_ended_while_it_was_computed_is_freed_when_that_is_done() -> None:
    kept = Kept()
    half = kept.begin()
    assert await kept.handovers.end("one")
    assert kept.released == []
    await kept.computed(half)
    assert (kept.released, len(kept.handovers)) == (["one"], 0)


@pytest.mark.parametrize("ended", [True, False])
async def test_a_prompt_that_came_to_nothing_leaves_nothing(ended: bool) -> None:
    kept = Kept()
    half = kept.begin()
    if ended:
        await kept.handovers.end("one")
    await kept.handovers.computed(half)
    assert (kept.released, len(kept.handovers)) == ([], 0)


async def test_it_is_forgotten_when_the_engine_has_freed_it_by_itself() -> None:
    kept = Kept()
    await kept.computed(kept.begin())
    kept.now = HOLD_S
    assert len(kept.handovers) == 0
    assert not await kept.handovers.end("one")
    assert kept.released == []


async def test_an_engine_that_can_t_be_told_fails_nobody() -> None:
    async def release(handover: Handover) -> None:
        raise RuntimeError("dead")

    handovers = Handovers(release)
    half = handovers.begin("one")
    half.handover = Handover("one", "e", "r", 3, b"", HOLD_S)
    await handovers.computed(half)
    assert await handovers.end("one")
    assert len(handovers) == 0


@pytest.mark.parametrize("name", ["", "a" * 129, "zeile\n", "ü"])
async def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(HandoverError):
        Kept().begin(name)


async def test_a_name_is_used_once_at_a_time() -> None:
    kept = Kept()
    kept.begin()
    with pytest.raises(HandoverError, match="there already"):
        kept.begin()


async def test_who_stops_waits_for_what_others_still_fetch() -> None:
    kept = Kept()
    await kept.computed(kept.begin())
    waiting = asyncio.ensure_future(kept.handovers.empty(10.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await kept.handovers.end("one")
    assert await waiting


STEPS = st.sampled_from(["begin", "computed", "failed", "end", "wait"])


@given(st.lists(st.tuples(STEPS, st.integers(0, 3))))
def test_in_any_order_all_that_was_computed_is_freed_or_expired(steps: list[tuple[str, int]]) -> None:
    asyncio.run(_in_order(steps))


async def _in_order(steps: list[tuple[str, int]]) -> None:
    kept = Kept()
    computing: dict[str, FirstHalf] = {}
    held: dict[str, float] = {}
    given_up: set[str] = set()
    gone: list[str] = []
    for step, number in steps:
        name = f"h{number}"
        held = {each: until for each, until in held.items() if until > kept.now}
        if step == "begin":
            if name not in computing and name not in held:
                computing[name] = kept.begin(name)
        elif step == "computed" and name in computing:
            await kept.computed(computing.pop(name))
            if name in given_up:
                gone.append(name)
            else:
                held[name] = kept.now + HOLD_S
            given_up.discard(name)
        elif step == "failed" and name in computing:
            await kept.handovers.computed(computing.pop(name))
            given_up.discard(name)
        elif step == "end":
            known = await kept.handovers.end(name)
            assert known == (name in computing or name in held)
            if name in computing:
                given_up.add(name)
            elif held.pop(name, None) is not None:
                gone.append(name)
        elif step == "wait":
            kept.now += HOLD_S / 2
        kept.handovers.check_integrity()
        assert kept.released == gone
    held = {each: until for each, until in held.items() if until > kept.now}
    assert len(kept.handovers) == len(computing) + len(held)
