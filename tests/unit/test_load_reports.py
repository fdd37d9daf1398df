"""When a replica tells how busy it is: at once when something happens, and never in a flood."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator

import pytest

from cache_store.config import CacheConfig
from cache_store.events import Load, Share
from workers.config import EngineConfig, ModelConfig, SimConfig
from workers.hosted import HostedReplica
from workers.messages import ReservationName
from workers.sim.engine import SimEngine

ROUTER = "a" * 16
LEAST_GAP_S = 0.05


class Told(list[tuple[float, Load]]):
    """Reports with the time of each."""

    def __init__(self) -> None:
        super().__init__()
        self._more = asyncio.Event()

    def add(self, load: Load) -> None:
        self.append((time.monotonic(), load))
        self._more.set()

    async def wait_for(self, count: int) -> Load:
        async with asyncio.timeout(10):
            while len(self) < count:
                self._more.clear()
                await self._more.wait()
        return self[count - 1][1]


@pytest.fixture
async def replica() -> AsyncIterator[HostedReplica]:
    engine = SimEngine(
        EngineConfig(kind="sim", sim=SimConfig()), ModelConfig(name="toy"), CacheConfig(chunk_tokens=64)
    )
    hosted = HostedReplica("it", "unified", engine, CacheConfig(chunk_tokens=64), "secret")
    await hosted.start()
    yield hosted
    await hosted.stop()


@pytest.fixture
def told(replica: HostedReplica) -> Told:
    told = Told()
    report = replica.publisher.report

    def listen(load: Load) -> None:
        told.add(load)
        report(load)

    replica.publisher.report = listen  # type: ignore[method-assign]
    return told


async def test_every_step_of_a_request_is_told_without_waiting_for_the_next_look(
    replica: HostedReplica, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    for period in ("_BUSY_PERIOD_S", "_SILENCE_S"):
        monkeypatch.setattr(f"workers.hosted.{period}", 3600.0)
    request = replica.requests.open(ReservationName(ROUTER, 4, 100))
    load = await told.wait_for(1)
    assert (load.http_requests, load.prefilling, load.prefill_tokens) == (1, 1, 100)
    assert load.share(ROUTER) == Share(ROUTER, 4, 1, 1, 100)
    request.end_prefill(100)
    load = await told.wait_for(2)
    assert (load.http_requests, load.prefilling, load.prefill_tokens) == (1, 0, 0)
    request.close()
    load = await told.wait_for(3)
    assert (load.http_requests, load.shares) == (0, ())


async def test_a_storm_of_requests_is_told_in_few_reports(replica: HostedReplica, told: Told) -> None:
    began = time.monotonic()
    while time.monotonic() - began < 0.4:
        replica.requests.open(ReservationName(ROUTER, 1, 1)).close()
        await asyncio.sleep(0)
    assert (await told.wait_for(3)).seq == 0
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(told)]
    # Timers of the loop may fire a clock tick early.
    assert min(gaps) >= LEAST_GAP_S - 0.002, gaps


async def test_an_idle_replica_says_so_from_time_to_time(replica: HostedReplica, told: Told) -> None:
    await told.wait_for(2)
    (_, first), (_, second) = told[:2]
    assert (first.http_requests, second.http_requests) == (0, 0)
