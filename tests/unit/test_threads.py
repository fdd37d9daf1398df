"""Where the store's work on bytes is done: on the loop only when it is short and alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from cache_store.threads import Threads


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads("test", 2)
    yield threads
    threads.close()


async def test_short_work_that_is_alone_is_done_on_the_loop(threads: Threads) -> None:
    for _ in range(3):
        assert await threads.finish_short(1.0, threading.get_ident) == threading.get_ident()
        await asyncio.sleep(0)


async def test_of_short_work_that_comes_at_once_the_loop_does_one_piece(threads: Threads) -> None:
    here = threading.get_ident()
    found = await asyncio.gather(*(threads.finish_short(None, threading.get_ident) for _ in range(8)))
    assert found[0] == here
    assert here not in found[1:]


async def test_short_work_goes_to_a_thread_while_another_is_busy(threads: Threads) -> None:
    begun, end = asyncio.Event(), threading.Event()
    loop, here = asyncio.get_running_loop(), threading.get_ident()

    def long() -> None:
        loop.call_soon_threadsafe(begun.set)
        end.wait(10)

    busy = asyncio.create_task(threads.finish(None, long))
    await begun.wait()
    assert await threads.finish_short(1.0, threading.get_ident) != here
    end.set()
    await busy
    await asyncio.sleep(0)
    assert await threads.finish_short(1.0, threading.get_ident) == here


async def test_work_that_was_given_up_before_it_began_keeps_nobody_from_the_loop(threads: Threads) -> None:
    end = threading.Event()
    busy = [asyncio.create_task(threads.finish(None, end.wait, 10)) for _ in range(2)]
    # So that both have a thread before anything else is asked for.
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        await threads.finish(0.01, threading.get_ident)
    end.set()
    await asyncio.gather(*busy)
    assert await threads.finish_short(1.0, threading.get_ident) == threading.get_ident()


async def test_short_work_that_fails_on_the_loop_raises_and_is_over(threads: Threads) -> None:
    def failing() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await threads.finish_short(None, failing)
    await asyncio.sleep(0)
    assert await threads.finish_short(None, threading.get_ident) == threading.get_ident()
