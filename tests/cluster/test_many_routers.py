"""Several routers on real Ray Serve, and one that is killed: what it had open, and what its successor knows."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import aiohttp
import httpx
import pytest

from router import decision_log
from router.decision_log import Decision
from router.headers import parse_cached
from tests.cluster.deployed import Deployed, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

STREAMS = 12
PREFIXES = 64
PROMPT_TOKENS = 2000
RATE = 200.0
"""Requests per second, or what the machine gives."""
WATCHED_S = 10.0


@contextmanager
def open_streams(cluster: Deployed, count: int) -> Iterator[list[bool]]:
    """Long answers under way; yields the list to which each adds whether its end was a broken connection."""
    broken: list[bool] = []
    stop = threading.Event()
    begun = threading.Semaphore(0)

    def stream(number: int) -> None:
        body = {"model": "sim", "prompt": f"stream {number}", "max_tokens": 4000, "stream": True}
        url = f"{cluster.endpoint}/v1/completions"
        try:
            with httpx.stream("POST", url, json=body, timeout=60) as answer:
                for index, _ in enumerate(answer.iter_bytes()):
                    if index == 0:
                        begun.release()
                    if stop.is_set():
                        break
        except httpx.HTTPError:
            broken.append(True)

    with ThreadPoolExecutor(count) as threads:
        running = [threads.submit(stream, number) for number in range(count)]
        try:
            assert all(begun.acquire(timeout=60) for _ in range(count))
            yield broken
        finally:
            stop.set()
        assert all(each.exception() is None for each in running)


def test_what_a_killed_router_had_open_leaves_the_replicas_and_the_others_view(
    deploy_sim: Callable[..., Deployed],
) -> None:
    cluster = deploy_sim(
        router={"replicas": 2}, engine={"sim": {"decode_tokens_per_s": 20, "virtual_replicas": 2}}
    )
    cluster.ready_replicas(4)

    def at_replicas() -> int:
        return sum(replica["open_requests"] for replica in cluster.replicas())

    with open_streams(cluster, STREAMS) as broken:
        wait_for("all streams in the reports", lambda: at_replicas() == STREAMS)
        for pid in cluster.pids("router").values():
            # HAProxy may have given one of them no stream at all.
            os.kill(pid, signal.SIGKILL)
            with suppress(AssertionError):
                wait_for("streams that broke", lambda: broken, 10)
                break
        assert broken
        wait_for("no more in the reports than go on", lambda: at_replicas() == STREAMS - len(broken), 10)
    wait_for("nothing open", lambda: at_replicas() == 0)


class Answer(NamedTuple):
    at: float
    """Seconds of the monotonic clock."""
    cached: int | None
    """Prompt tokens that the replica had; None for no answer."""


async def ask(session: aiohttp.ClientSession, url: str, number: int, answers: list[Answer]) -> None:
    body = {"model": "sim", "prompt": prompt(number), "max_tokens": 1}
    cached = None
    try:
        async with session.post(url, json=body) as answer:
            await answer.read()
            if answer.status == 200:
                cached = parse_cached(answer.headers["x-manta-cached"])["hbm"]
    except (aiohttp.ClientError, OSError):
        pass
    answers.append(Answer(time.monotonic(), cached))


def prompt(number: int) -> str:
    return f"{number:04}" + "word" * (PROMPT_TOKENS - 1)


async def ask_while(url: str, goes_on: Callable[[list[Answer]], bool]) -> list[Answer]:
    """Requests at `RATE`, whatever becomes of them, over and over the same prompts."""
    answers: list[Answer] = []
    began, sent = time.monotonic(), 0
    async with (
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=64), timeout=aiohttp.ClientTimeout(total=30)
        ) as session,
        asyncio.TaskGroup() as asking,
    ):
        while goes_on(answers):
            # One that is late does not make up for it: it would ask in bursts.
            began = max(began, time.monotonic() - (sent + 1) / RATE)
            await asyncio.sleep(max(0.0, began + sent / RATE - time.monotonic()))
            asking.create_task(ask(session, url, sent % PREFIXES, answers))
            sent += 1
    return answers


def decisions(cluster: Deployed) -> list[Decision]:
    return decision_log.load(io.BytesIO(cluster.decisions()))


def first_after(answers: list[Answer], moment: float) -> float | None:
    return next((each.at for each in answers if each.at > moment and each.cached is not None), None)


def test_a_restarted_router_decides_with_what_the_replicas_hold_from_its_first_request_on(
    deploy_sim: Callable[..., Deployed],
) -> None:
    cluster = deploy_sim(engine={"sim": {"virtual_replicas": 4}})
    cluster.ready_replicas(8)
    url = f"{cluster.endpoint}/v1/completions"
    warm = {"model": "sim", "max_tokens": 1}
    for number in range(PREFIXES):
        assert cluster.http.post("/v1/completions", json=warm | {"prompt": prompt(number)}).status_code == 200
    known = PREFIXES * (PROMPT_TOKENS // 64)
    wait_for("all chunks in the index", lambda: sum(r["chunks"] for r in cluster.replicas()) >= known)
    killed: dict[str, Any] = {}

    def goes_on(answers: list[Answer]) -> bool:
        """Kill the router in the middle of its work, and go on until its successor has worked for a while."""
        now = time.monotonic()
        if not killed:
            if sum(each.cached is not None for each in answers) > RATE:
                os.kill(next(iter(killed_pids.values())), signal.SIGKILL)
                killed["at"] = now
            return True
        assert now < killed["at"] + 120, "no new router"
        back = first_after(answers, killed["at"] + 1.0)
        if back is None or now < back + 1.0:
            return True
        if now >= killed.setdefault("log_at", back + 1.0):
            # The log holds the last thousand.
            log.update({decision.number: decision for decision in decisions(cluster)})
            killed["log_at"] = now + 1.0
        return now < back + WATCHED_S

    log: dict[int, Decision] = {}
    killed_pids = cluster.pids("router")
    answers = asyncio.run(ask_while(url, goes_on))
    assert not set(killed_pids) & set(cluster.pids("router"))
    assert 1 in log
    assert len(log) > RATE
    # Some replica holds each of these prompts. That another one is chosen, which is less busy, is no blindness.
    blind = sum(all(row.matched == 0 for row in decision.candidates) for decision in log.values())
    assert blind < 0.01 * len(log), f"{blind} of {len(log)}"
    back = first_after(answers, killed["at"] + 1.0)
    assert back is not None
    served = [each.cached for each in answers if each.at >= back and each.cached is not None]
    assert sum(cached > 0 for cached in served) > 0.8 * len(served)
