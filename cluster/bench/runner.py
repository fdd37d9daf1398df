"""Sends a workload to an endpoint: sessions in order, requests at their times, everything bounded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from cluster.bench.arrivals import arriving
from cluster.bench.client import Answered, Client
from cluster.bench.config import MAX_CONCURRENCY, Arrival, BenchConfig
from cluster.bench.conversation import Conversation, Planned
from cluster.bench.prompts import PromptWriter
from cluster.bench.record import RequestRecord, RunOutcome
from cluster.bench.workloads import Session, planned_requests, sessions
from router.headers import parse_cached
from workers.messages import CACHED_HEADER, REPLICA_HEADER

PREFILL_HEADER = "x-manta-prefill"
DEFAULT_CONCURRENCY = 16
_MAX_OPEN_SESSIONS = 100_000


class Progress:
    """Counters of a run, for whoever watches it."""

    def __init__(self, requests: int | None = None) -> None:
        self.requests = requests
        self.running = self.finished = self.failed = self.chunks = 0

    def on_chunks(self, count: int) -> None:
        self.chunks += count


class Runner:
    """One run over an open client. Call `run` once."""

    def __init__(
        self,
        config: BenchConfig,
        client: Client,
        writer: PromptWriter,
        progress: Progress,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` is the client's."""
        self._config = config
        self._client = client
        self._writer = writer
        self._progress = progress
        self._clock = clock
        self._records: list[RequestRecord] = []
        self._in_flight = asyncio.Semaphore(config.arrival.concurrency or MAX_CONCURRENCY)
        self._start = 0.0

    async def run(self, stop: asyncio.Event) -> RunOutcome:
        """Ends with the workload or the duration, or at once when `stop` is set: what is in flight is cancelled and
        recorded as interrupted. Raises TraceError."""
        self._start = self._clock()
        work = asyncio.create_task(self._closed() if self._config.arrival.kind == "closed" else self._open())
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
            interrupted = not work.done()
        finally:
            work.cancel()
            stopped.cancel()
            ends = await asyncio.gather(work, stopped, return_exceptions=True)
        if isinstance(ends[0], Exception):
            raise ends[0]
        return RunOutcome(self._records, self._now(), interrupted)

    async def _closed(self) -> None:
        """So many sessions at a time, each followed by the next."""
        config = self._config
        planned = planned_requests(config.workload, config.num_requests, config.duration_s)
        waiting = sessions(config.workload, config.seed, planned)

        async def user() -> None:
            for session in waiting:
                if self._is_over():
                    return
                await self._session(self._conversation(session), session, None, self._now())

        users = config.arrival.concurrency or DEFAULT_CONCURRENCY
        await _all({asyncio.create_task(user()) for _ in range(users)})

    async def _open(self) -> None:
        """Sessions start at their times, however many are open."""
        config = self._config
        planned = planned_requests(config.workload, config.num_requests, config.duration_s)
        waiting = arriving(
            sessions(config.workload, config.seed, planned), config.arrival, config.seed, planned
        )
        room = asyncio.Semaphore(_MAX_OPEN_SESSIONS)
        opened: set[asyncio.Task[None]] = set()
        try:
            for at_s, session in waiting:
                conversation = self._conversation(session)
                first = conversation.ask()  # written before its time, so that writing delays nothing
                await self._sleep(at_s - self._now())
                # Of several that are due at once, the first need not wait for the last to be written.
                await asyncio.sleep(0)
                if self._is_over():
                    break
                await room.acquire()
                task = asyncio.create_task(self._session(conversation, session, first, at_s))
                opened.add(task)
                task.add_done_callback(opened.discard)
                task.add_done_callback(lambda _: room.release())
            await _all(opened)
        finally:
            await _end(opened)

    def _conversation(self, session: Session) -> Conversation:
        return Conversation(session, self._writer, self._config.target)

    async def _session(
        self, conversation: Conversation, session: Session, first: Planned | None, due_s: float
    ) -> None:
        for number, turn in enumerate(session.turns):
            if number:
                due_s = self._now() + turn.think_s
                await self._sleep(turn.think_s)
            if number and self._is_over():
                return
            planned = first if first is not None and number == 0 else conversation.ask()
            async with self._in_flight:
                answered = await self._request(planned, session, number, due_s)
            if answered.error is None:
                conversation.answered(answered.text, answered.output_tokens)
            else:
                conversation.failed()

    async def _request(self, planned: Planned, session: Session, turn: int, due_s: float) -> Answered:
        progress = self._progress
        progress.running += 1
        sent_s = self._now()
        try:
            answered = await self._client.ask(planned)
        except asyncio.CancelledError:
            self._records.append(
                RequestRecord(
                    session=session.name,
                    turn=turn,
                    due_s=due_s,
                    sent_s=sent_s,
                    end_s=self._now(),
                    outcome="interrupted",
                    input_tokens=planned.input_tokens,
                )
            )
            raise
        finally:
            progress.running -= 1
        progress.finished += 1
        progress.failed += answered.error is not None
        self._records.append(self._record(answered, session, turn, due_s))
        return answered

    def _record(self, answered: Answered, session: Session, turn: int, due_s: float) -> RequestRecord:
        return RequestRecord(
            session=session.name,
            turn=turn,
            due_s=due_s,
            sent_s=answered.sent - self._start,
            end_s=answered.end - self._start,
            outcome="ok" if answered.error is None else "error",
            token_s=tuple(answered.token_s),
            input_tokens=answered.input_tokens,
            output_tokens=answered.output_tokens,
            cached_tokens=answered.cached_tokens,
            tiers=parse_cached(answered.headers.get(CACHED_HEADER, "")),
            replica=answered.headers.get(REPLICA_HEADER),
            prefill=answered.headers.get(PREFILL_HEADER),
            status=answered.status,
            retries=answered.retries,
            error=answered.error,
        )

    def _now(self) -> float:
        return self._clock() - self._start

    def _is_over(self) -> bool:
        return self._config.duration_s is not None and self._now() >= self._config.duration_s

    async def _sleep(self, seconds: float) -> None:
        """Until then, or the end of the run's duration."""
        if self._config.duration_s is not None:
            seconds = min(seconds, self._config.duration_s - self._now())
        if seconds > 0:
            await asyncio.sleep(seconds)


def warmup_config(config: BenchConfig) -> BenchConfig:
    """The warm-up of a run: the same workload in other words, in a closed loop. `config.warmup` is not zero."""
    concurrency = min(config.warmup, config.arrival.concurrency or DEFAULT_CONCURRENCY)
    return config.model_copy(
        update={
            "seed": -1 - config.seed,
            "arrival": Arrival(kind="closed", concurrency=concurrency),
            "num_requests": config.warmup,
            "duration_s": None,
        }
    )


async def _all(tasks: AbstractSet[asyncio.Task[None]]) -> None:
    """Wait for all; when cancelled, or when one fails, none is left behind."""
    try:
        await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: AbstractSet[asyncio.Task[None]]) -> None:
    left = list(tasks)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
