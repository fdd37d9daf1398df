"""One flight of a name at a time, which its passengers may leave; and work in threads that nobody can stop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cache_store.flights import Flights, arrival, settled
from cache_store.threads import Threads

LIMIT_S = 30.0


async def test_all_who_wait_get_what_one_flight_brings() -> None:
    flights: Flights[str, int] = Flights()
    gate, journeys = asyncio.Event(), 0

    async def journey() -> int:
        nonlocal journeys
        journeys += 1
        await gate.wait()
        return 7

    flight = flights.start("a", journey())
    waiting = [asyncio.create_task(arrival(flight, LIMIT_S)) for _ in range(5)]
    assert flights.get("a") is flight
    gate.set()
    assert await asyncio.gather(*waiting) == [7] * 5
    assert (journeys, len(flights), flights.get("a")) == (1, 0, None)


async def test_a_passenger_may_leave_and_the_flight_goes_on() -> None:
    flights: Flights[str, int] = Flights()
    gate = asyncio.Event()

    async def journey() -> int:
        await gate.wait()
        return 7

    flight = flights.start("a", journey())
    with pytest.raises(TimeoutError):
        await arrival(flight, 0.001)
    leaving = asyncio.create_task(arrival(flight, LIMIT_S))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    gate.set()
    assert await arrival(flight, LIMIT_S) == 7


async def test_what_goes_wrong_is_told_to_those_who_wait_and_the_name_is_free() -> None:
    flights: Flights[str, int] = Flights()

    async def journey() -> int:
        raise RuntimeError("lost")

    flight = flights.start("a", journey())
    with pytest.raises(RuntimeError, match="lost"):
        await arrival(flight, LIMIT_S)
    assert "a" not in flights


async def test_closing_waits_for_those_that_land_and_cancels_the_others() -> None:
    flights: Flights[str, int] = Flights()

    async def journey(gate: asyncio.Event) -> int:
        await gate.wait()
        return 7

    lands, never = asyncio.Event(), asyncio.Event()
    lands.set()
    landed, late = flights.start("a", journey(lands)), flights.start("b", journey(never))
    await flights.close(0.05)
    assert landed.result() == 7
    assert late.cancelled()
    assert len(flights) == 0


async def test_waiting_to_the_end_is_not_cut_short_by_being_cancelled() -> None:
    end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(settled(end))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    end.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await waiting


class Work:
    def __init__(self) -> None:
        self.begun, self.gate, self.ended = threading.Event(), threading.Event(), threading.Event()

    def __call__(self) -> int:
        self.begun.set()
        assert self.gate.wait(LIMIT_S)
        self.ended.set()
        return 7


async def begun(work: Work) -> None:
    assert await asyncio.to_thread(work.begun.wait, LIMIT_S)


async def test_work_that_has_begun_is_waited_for_past_its_limit_and_past_cancellation() -> None:
    threads, work = Threads("t", 1), Work()
    task = asyncio.create_task(threads.finish(None, work))
    await begun(work)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    work.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended.is_set()
    threads.close()


async def test_work_that_has_not_begun_within_its_limit_never_does() -> None:
    threads, first, second = Threads("t", 1), Work(), Work()
    running = asyncio.create_task(threads.finish(None, first))
    await begun(first)
    with pytest.raises(TimeoutError):
        await threads.finish(0.001, second)
    queued = asyncio.create_task(threads.finish(None, second))
    await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    first.gate.set()
    assert await running == 7
    assert await threads.finish(None, lambda: 8) == 8
    assert not second.begun.is_set()
    threads.close()


async def test_an_attempt_is_given_up_at_its_limit() -> None:
    threads, work = Threads("t", 2), Work()
    with pytest.raises(TimeoutError):
        await threads.attempt(0.01, work)
    assert await threads.attempt(LIMIT_S, lambda: 8) == 8
    work.gate.set()
    threads.close()


async def test_what_work_raises_is_raised_and_holds_nothing() -> None:
    threads = Threads("t", 1)
    data = bytearray(8)

    def fails(view: memoryview) -> None:
        export = memoryview(view)
        raise MemoryError(len(export))

    view = memoryview(data)
    try:
        await threads.finish(None, fails, view)
    except MemoryError as error:
        caught = str(error)
    assert caught == "8"
    view.release()
    threads.close()
