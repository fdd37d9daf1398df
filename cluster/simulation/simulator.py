"""The event loop: requests come, are decided, loaded, computed, transferred, answered; replicas die, start and stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from cache_store.events import Load
from cluster.simulation.asked import Asked
from cluster.simulation.config import SimulationConfig
from cluster.simulation.engine import Engine, Happened, Job
from cluster.simulation.engine_times import prefill_s
from cluster.simulation.events import Events
from cluster.simulation.fleet import Fleet
from cluster.simulation.gaps import Gaps
from cluster.simulation.node_stores import Moved, NodeStores
from cluster.simulation.records import SOURCES, Outcome, Records
from cluster.simulation.router_view import ByPolicy, Decided, Decider, RouterView
from cluster.simulation.workload import Request, Workload, chunk_key, chunk_keys
from router.candidates import Ints
from router.choice import RouteRequest
from router.policies import policy_from

REPORT_S = 1.0
"""Between two load reports of a busy replica."""
_TOLD_EVERY = 500
OnProgress = Callable[[int], None]
"""Called now and then with how many requests have ended."""


class Outcomes(NamedTuple):
    """All that a run leaves behind."""

    records: Records
    gaps: Gaps
    moved: Moved
    replica_seconds: float
    most_replicas: int
    ended_s: float


class Simulator:
    """One run of one decider. `run` may be called once."""

    def __init__(
        self,
        config: SimulationConfig,
        workload: Workload,
        decider: Decider | None = None,
        on_progress: OnProgress = lambda ended: None,
    ) -> None:
        """`decider`: the policy of the configuration where not given."""
        self._config, self._workload, self._on_progress = config, workload, on_progress
        self._events = Events()
        self.fleet = Fleet(config)
        size = self.fleet.size
        names = [f"replica-{row}" for row in range(size)]
        self._nodes = [f"node-{row // config.replicas_per_node}" for row in range(size)]
        pool = config.prefill_pool.replicas if config.prefill_pool is not None else 0
        self.router = RouterView(
            decider or ByPolicy(policy_from(config.policy)), names, self._nodes,
            [row >= size - pool for row in range(size)], config.chunk_tokens, config.news_delay_s, lambda: self.now,
        )  # fmt: skip
        self.stores = NodeStores(config, list(dict.fromkeys(self._nodes)), self.router.tell)
        self.gaps = Gaps()
        self.engines = [
            Engine(
                config.engine, config.blocks, config.chunk_tokens, self.gaps,
                partial(self._load, row) if self.stores.enabled else None,
            )
            for row in range(size)
        ]  # fmt: skip
        self.records = Records()
        self._arrivals = iter(workload.arrivals())
        self._versions = [0] * size
        self._reported_s = [-REPORT_S] * size
        self._open: dict[int, Asked] = {}
        self._at: list[dict[int, Asked]] = [{} for _ in range(size)]
        """Per replica, those that are decided for it."""
        self._unplaced: deque[Asked] = deque()
        self._numbers = 0
        self._coming = 0
        """Requests whose time is set."""
        self._chunk_cost_s = prefill_s(config.engine, config.chunk_tokens, 0)

    @property
    def now(self) -> float:
        return self._events.now

    def run(self) -> Outcomes:
        self._next_arrival()
        for failure in self._config.failures:
            self._events.later(failure.at_s, partial(self._die, failure.replica))
            if failure.back_s is not None:
                self._events.later(failure.back_s, partial(self._start, failure.replica))
        if self._config.autoscaling is not None:
            self._events.later(self._config.autoscaling.interval_s, self._scale)
        self._events.run(lambda: not self._open and not self._coming)
        for waiting in tuple(self._unplaced):
            self._end(waiting, "refused")
        ended = max(self.records.ended_s, default=self.now)
        self._on_progress(len(self.records))
        return Outcomes(
            self.records,
            self.gaps,
            self.stores.moved,
            self.fleet.replica_seconds(ended),
            self.fleet.most,
            ended,
        )

    # Requests

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._coming += 1
            self._events.later(request.at_s, partial(self._arrived, request))

    def _arrived(self, request: Request) -> None:
        self._next_arrival()
        self._come(request)

    def _come(self, request: Request) -> None:
        self._coming -= 1
        self._numbers += 1
        answer = [chunk_key(block) for block in request.answer_blocks]
        new = Asked(self._numbers, request, chunk_keys(request), answer)
        self._open[new.number] = new
        if self.engines[0].blocks(request.prompt_tokens, request.output_tokens) > self._config.blocks:
            self._end(new, "refused")
        else:
            self._place(new)

    def _place(self, request: Asked) -> None:
        prefill = self._config.prefill_pool is not None
        rows = self.fleet.candidates(prefill)
        if not self._decide(request, rows, computes=True):
            self._unplaced.append(request)
            return
        decided = request.decided
        assert decided is not None
        asked = request.request
        request.job = Job(
            request.number,
            request.keys,
            asked.prompt_tokens,
            1 if prefill else asked.output_tokens,
            () if prefill else request.answer,
        )
        self._fetch_ahead(request, decided)
        self._happened(decided.row, self.engines[decided.row].submit(request.job, self.now))

    def _decide(self, request: Asked, rows: Ints | None, computes: bool) -> bool:
        if rows is not None and not len(rows):
            return False
        asked = request.request
        # As in the router: what begins alike counts as one session where the client names none.
        session = (
            f"session-{asked.session}" if asked.session else "".join(key.hex() for key in request.keys[:1])
        )
        route = RouteRequest(f"request-{request.number}", asked.prompt_tokens, None, session)
        decided = self.router.decide(route, request.keys, rows, computes)
        if decided is None:
            return False
        request.attempts += computes
        request.decided, request.decided_s = decided, self.now if computes else request.decided_s
        if computes and decided.choice.predicted is not None:
            request.predicted_s = decided.choice.predicted.ttft_s
        self._at[decided.row][request.number] = request
        return True

    def _fetch_ahead(self, request: Asked, decided: Decided) -> None:
        """The router tells the node's store to bring near what is to be loaded."""
        start = decided.choice.matched_tokens // self._config.chunk_tokens
        count = decided.choice.load_tokens // self._config.chunk_tokens
        if not count or not self.stores.enabled:
            return
        keys = request.keys[start : start + count]
        fetched = self.stores.prefetch(self._nodes[decided.row], keys, self.now, self._chunk_cost_s)
        request.ready_s = fetched.ready_s
        request.came_from(fetched.chunks)

    def _load(self, row: int, job: Job, there: int) -> bool:
        """An engine asks for what is behind its own `there` chunks. True while it must wait."""
        request = self._open[job.number]
        most = (job.prompt_tokens - 1) // self._config.chunk_tokens
        fetched = self.stores.load(self._nodes[row], job.keys[there:most], self.now, self._chunk_cost_s)
        if not fetched.chunks.total:
            return False
        job.loaded = there + fetched.chunks.total
        # What was fetched ahead is in memory now, and counts by where it came from.
        ahead = min(fetched.chunks.dram, sum(request.sources))
        request.came_from(fetched.chunks._replace(dram=fetched.chunks.dram - ahead))
        ready = max(fetched.ready_s, request.ready_s)
        self._events.later(ready, partial(self._loaded, row, request, request.attempts))
        return True

    def _loaded(self, row: int, request: Asked, attempt: int) -> None:
        if request.attempts == attempt and request.number in self._open and request.job is not None:
            self._happened(row, self.engines[row].submit(request.job, self.now, first=True))

    # Engines

    def _happened(self, row: int, happened: Happened) -> None:
        """Take over what an engine did, and wake it when it is next due."""
        name = self.router.replicas[row]
        if happened.added or happened.removed:
            self.router.tell(name, "hbm", happened.added, happened.removed)
        for job in happened.first_tokens:
            self._first_token(row, self._open[job.number], job)
        for job in happened.finished:
            self._finished(row, self._open[job.number], job)
        engine = self.engines[row]
        self.router.kv_used[row] = engine.kv_used
        if self.now - self._reported_s[row] >= REPORT_S:
            self._reported_s[row] = self.now
            self.router.report(row, self._report(engine))
        version = self._versions[row] = self._versions[row] + 1
        due = engine.next_at()
        if due is not None:
            self._events.later(due, partial(self._engine_due, row, version))

    def _engine_due(self, row: int, version: int) -> None:
        if self._versions[row] == version:
            self._happened(row, self.engines[row].advance(self.now))

    def _report(self, engine: Engine) -> Load:
        return Load(
            engine.waiting, engine.running, 0, engine.kv_used, engine.prefill_rate, engine.decode_rate
        )

    def _first_token(self, row: int, request: Asked, job: Job) -> None:
        decided = request.decided
        assert decided is not None
        if job.prefilled:
            # The second half of a request that was computed elsewhere; only its first token is new.
            request.first_s = self.now
            self.router.first_token(decided, ())
            return
        self.router.first_token(decided, request.keys)
        loaded = request.loaded_tokens(self._config.chunk_tokens)
        tokens = dict(zip(SOURCES, (job.cached, *loaded), strict=True)) | {"computed": job.computed}
        self.router.observe(row, decided.ahead.observation(self.now - request.decided_s, tokens))
        self.stores.save(self._nodes[row], job.stored, self._chunk_cost_s)
        if self._config.prefill_pool is None or request.request.output_tokens <= 1:
            request.first_s = self.now

    def _finished(self, row: int, request: Asked, job: Job) -> None:
        decided = request.decided
        assert decided is not None
        self.router.ended(decided)
        self._leave(row, request)
        if self._config.prefill_pool is not None and not job.prefilled and request.request.output_tokens > 1:
            self._transfer(request)
            return
        self.stores.save(self._nodes[row], job.answer, self._chunk_cost_s)
        self._end(request, "answered")

    def _end(self, request: Asked, outcome: Outcome) -> None:
        del self._open[request.number]
        request.record(self.records, outcome, self.now, self._config.chunk_tokens)
        if len(self.records) % _TOLD_EVERY == 0:
            self._on_progress(len(self.records))
        if (
            outcome == "answered"
            and (more := self._workload.follow_up(request.request, self.now)) is not None
        ):
            self._coming += 1
            self._events.later(more.at_s, partial(self._come, more))

    def _leave(self, row: int, request: Asked) -> None:
        self._at[row].pop(request.number, None)
        if row in self.fleet.draining and not self._at[row]:
            self._stop(row)

    # Prefill and decode apart

    def _transfer(self, request: Asked) -> None:
        assert self._config.prefill_pool is not None
        times = self._config.prefill_pool.transfer
        nbytes = request.request.prompt_tokens * self._config.engine.kv_bytes_per_token
        self.stores.moved.transferred += nbytes
        self._events.later(
            self.now + times.latency_s + nbytes / times.bytes_per_s,
            partial(self._decode, request, request.attempts),
        )

    def _decode(self, request: Asked, attempt: int) -> None:
        if not self._decide(request, self.fleet.candidates(prefill=False), computes=False):
            self._unplaced.append(request)
            return
        decided = request.decided
        assert decided is not None
        asked = request.request
        job = Job(
            request.number,
            request.keys,
            asked.prompt_tokens,
            asked.output_tokens,
            request.answer,
            prefilled=True,
        )
        self._happened(decided.row, self.engines[decided.row].submit(job, self.now))

    # Replicas that die, start and stop

    def _die(self, row: int) -> None:
        if not self.fleet.serves(row):
            return
        there = list(self._at[row].values())
        self._at[row] = {}
        self._stop(row)
        for request in there:
            if request.first_s >= 0:
                self._end(request, "broken")
            else:
                request.start_again()
                self._place(request)

    def _stop(self, row: int) -> None:
        self.fleet.gone(row, self.now)
        self._versions[row] += 1
        self.engines[row].stop()
        self.router.died(row)
        self.router.draining[row] = False

    def _start(self, row: int) -> None:
        if self.fleet.serves(row):
            return
        self.fleet.started(row, self.now)
        waiting, self._unplaced = self._unplaced, deque()
        for request in waiting:
            self._place(request)

    def _scale(self) -> None:
        scaling = self._config.autoscaling
        assert scaling is not None
        lack = self.fleet.missing(scaling, len(self._open), self.now)
        for row in self.fleet.free_rows()[: max(0, lack)]:
            self.fleet.start(row, self.now)
            self._events.later(self.now + scaling.start_s, partial(self._start, row))
        for row in sorted(self.fleet.serving_rows(), key=lambda row: (len(self._at[row]), -row))[
            : max(0, -lack)
        ]:
            self.fleet.drain(row)
            if not self._at[row]:
                self._stop(row)
        self._events.later(self.now + scaling.interval_s, self._scale)
