"""The waiting room: bounded, in order, and empty once nobody waits, whatever happened to those who did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission import QueueFullError, QueueTimeoutError, WaitingRoom

LONG_S = 60.0


@dataclass
class Seats:
    """Something with room for so many: what requests wait for."""

    free: int
    taken_by: list[int] = field(default_factory=list)

    def take(self, who: int) -> int | None:
        if not self.free:
            return None
        self.free -= 1
        self.taken_by.append(who)
        return who


async def settle() -> None:
    """Let every task that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def start(room: WaitingRoom, seats: Seats, who: int, wants: Hashable = None) -> asyncio.Task[int]:
    async def enter() -> int:
        return await room.enter(lambda: seats.take(who), LONG_S, wants)

    return asyncio.create_task(enter())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is of plain data, with no event to wait for
            await asyncio.sleep(0)


async def test_nobody_waits_while_there_is_room() -> None:
    room, seats = WaitingRoom(max_waiting=0), Seats(2)
    assert [await start(room, seats, who) for who in range(2)] == [0, 1]


async def test_who_came_first_is_placed_first() -> None:
    room, seats = WaitingRoom(10), Seats(0)
    tasks = [start(room, seats, who) for who in range(5)]
    await settle()
    assert len(room) == 5
    for _ in range(5):
        seats.free += 1
        room.wake()
        await settle()
        room.check_integrity()
    assert seats.taken_by == [0, 1, 2, 3, 4]
    assert await asyncio.gather(*tasks) == [0, 1, 2, 3, 4]


async def test_one_wake_places_as_many_as_there_is_room_for() -> None:
    room, seats = WaitingRoom(10), Seats(0)
    tasks = [start(room, seats, who) for who in range(5)]
    await settle()
    seats.free = 3
    room.wake()
    await until(lambda: len(room) == 2)
    assert seats.taken_by == [0, 1, 2]
    seats.free = 2
    room.wake()
    await asyncio.gather(*tasks)


async def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    room, seats = WaitingRoom(10), Seats(0)
    first = start(room, seats, 1)
    await settle()
    seats.free = 1
    late = start(room, seats, 2)
    await settle()
    assert not late.done()
    room.wake()
    assert await first == 1
    seats.free = 1
    room.wake()
    assert await late == 2


async def test_a_full_room_refuses_with_a_time_to_come_back() -> None:
    now = 100.0
    room, seats = WaitingRoom(1, clock=lambda: now), Seats(0)
    waiting = start(room, seats, 1)
    await settle()
    with pytest.raises(QueueFullError, match="1 requests wait for a replica, the limit is 1") as refused:
        await room.enter(lambda: seats.take(2), LONG_S)
    assert refused.value.retry_after_s == 1.0
    now = 107.5
    with pytest.raises(QueueFullError) as refused:
        await room.enter(lambda: seats.take(2), LONG_S)
    assert refused.value.retry_after_s == 7.5, "as long as the first in line has waited"
    seats.free = 1
    room.wake()
    assert await waiting == 1


async def test_lowering_the_bound_refuses_newcomers_only() -> None:
    room, seats = WaitingRoom(10), Seats(0)
    waiting = [start(room, seats, who) for who in range(3)]
    await settle()
    room.max_waiting = 1
    with pytest.raises(QueueFullError, match="3 requests wait"):
        await room.enter(lambda: seats.take(9), LONG_S)
    seats.free = 3
    room.wake()
    assert await asyncio.gather(*waiting) == [0, 1, 2]


async def test_waiting_ends_at_the_time_limit() -> None:
    room, seats = WaitingRoom(10), Seats(0)
    with pytest.raises(QueueTimeoutError, match="no replica had room within") as late:
        await room.enter(lambda: seats.take(1), 0.01)
    assert late.value.retry_after_s >= 1.0
    assert len(room) == 0
    room.check_integrity()


async def test_the_first_in_line_passes_the_turn_on_when_it_gives_up() -> None:
    room, seats = WaitingRoom(10), Seats(0)
    first, second = start(room, seats, 1), start(room, seats, 2)
    await settle()
    seats.free = 1
    room.wake()
    first.cancel()
    assert await second == 2
    assert first.cancelled()
    assert seats.taken_by == [2], "no place was taken for who had gone"


async def test_one_that_nobody_can_serve_holds_up_only_its_like() -> None:
    room, nowhere, seats = WaitingRoom(10), Seats(0), Seats(0)
    stuck = [start(room, nowhere, who, wants="adapter") for who in range(2)]
    served = [start(room, seats, who, wants="base") for who in range(2)]
    await settle()
    seats.free = 2
    room.wake()
    assert await asyncio.gather(*served) == [0, 1]
    assert len(room) == 2
    nowhere.free = 2
    room.wake()
    assert await asyncio.gather(*stuck) == [0, 1]
    assert len(room) == 0


async def test_between_lines_too_who_came_first_is_placed_first() -> None:
    room, seats = WaitingRoom(10), Seats(0)
    tasks = [start(room, seats, who, wants=who // 2) for who in range(6)]
    await settle()
    seats.free = 3
    room.wake()
    newcomer = start(room, seats, 6, wants="a line of its own")
    await settle()
    assert seats.taken_by == [0, 1, 2]
    seats.free = 4
    room.wake()
    await asyncio.gather(*tasks, newcomer)
    assert seats.taken_by == [0, 1, 2, 3, 4, 5, 6]


async def test_a_newcomer_to_an_empty_line_is_served_when_those_called_before_it_find_nothing() -> None:
    room, nowhere, seats = WaitingRoom(10), Seats(0), Seats(1)
    stuck = start(room, nowhere, 1, wants="adapter")
    await settle()
    room.wake()
    assert await start(room, seats, 2, wants="base") == 2
    stuck.cancel()
    await until(lambda: len(room) == 0)


async def test_a_failing_attempt_ends_its_own_wait_only() -> None:
    room, seats = WaitingRoom(10), Seats(0)
    broken = False

    def fail() -> int | None:
        if broken:
            raise TimeoutError("lookup failed")
        return None

    async def enter_failing() -> int:
        return await room.enter(fail, LONG_S)

    failing, second = asyncio.create_task(enter_failing()), start(room, seats, 2)
    await settle()
    broken, seats.free = True, 1
    room.wake()
    with pytest.raises(TimeoutError, match="lookup failed"):
        await failing
    assert await second == 2


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 3)),
        st.tuples(st.just("free"), st.integers(1, 3)),
        st.tuples(st.just("wake"), st.just(0)),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
        st.tuples(st.just("step"), st.integers(1, 3)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, lines=st.integers(1, 3))
def test_any_interleaving_keeps_order_bound_and_places(steps: list[tuple[str, int]], lines: int) -> None:
    asyncio.run(_drive(steps, lines))


async def _drive(steps: list[tuple[str, int]], lines: int, max_waiting: int = 6) -> None:
    room, seats = WaitingRoom(max_waiting), Seats(2)
    tasks: list[asyncio.Task[int]] = []
    offered = seats.free
    for name, number in steps:
        if name == "arrive":
            tasks.append(start(room, seats, len(tasks), wants=number % lines))
            if number < 2:
                await settle()
        elif name == "free":
            seats.free += number
            offered += number
            room.wake()
        elif name == "wake":
            room.wake()
        elif name == "cancel" and tasks:
            tasks[number % len(tasks)].cancel()
        else:
            for _ in range(number):
                await asyncio.sleep(0)
        room.check_integrity()
        assert len(room) <= max_waiting
    await _settle_all(room)
    placed = [who for who, task in enumerate(tasks) if task.done() and _succeeded(task)]
    assert sorted(seats.taken_by) == placed, "who has a place was told so, and nobody else has one"
    assert seats.taken_by == placed, "in the order of arrival"
    assert len(seats.taken_by) + seats.free == offered
    assert not (seats.free and len(room)), "nobody waits beside a free place"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(room) == 0
    room.check_integrity()


async def _settle_all(room: WaitingRoom) -> None:
    before = None
    while before != len(room):
        before = len(room)
        for _ in range(20):
            await asyncio.sleep(0)


def _succeeded(task: asyncio.Task[int]) -> bool:
    return not task.cancelled() and task.exception() is None


async def test_a_storm_of_cancellations_leaves_nothing_behind() -> None:
    room, seats = WaitingRoom(1000), Seats(0)
    tasks = [start(room, seats, who) for who in range(500)]
    await until(lambda: len(room) == 500)
    for who, task in enumerate(tasks):
        if who % 10:
            task.cancel()
    await until(lambda: len(room) == 50)
    room.check_integrity()
    seats.free = 50
    room.wake()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [r for r in results if isinstance(r, int)] == list(range(0, 500, 10))
    assert len(room) == 0
