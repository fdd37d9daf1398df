"""One engine with continuous batching and chunked prefill, in simulated time.

Time goes in steps. Every running stream gets one token a step; a prefill takes as many steps as it has chunks of
`step_tokens`, and makes them longer. Between two events the length of a step does not change, so that the engine need
not be woken for each: it counts steps, and what will end has the step count at which it does.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cache_store.events import ChunkKey
from cluster.simulation.block_pool import BlockPool, Lease
from cluster.simulation.config import EngineTimes
from cluster.simulation.engine_times import prefill_s
from cluster.simulation.gaps import Gaps

_SAME = 1e-9
LOOK_AHEAD = 4
"""Requests in line whose loads begin while the prompt before them is computed."""
MOST_ASKED = 2
"""What was to be loaded behind may be evicted until its turn; after that the prompt is computed."""

Load = Callable[["Job", int], bool]
"""Asked with a request and its leading chunks that the engine has; True when the request must wait for a load, after
which it comes back by `submit(job, now, first=True)`."""


@dataclass(slots=True, eq=False)
class Job:
    """One request at one engine."""

    number: int
    """Of the request."""
    keys: Sequence[ChunkKey]
    prompt_tokens: int
    output_tokens: int
    answer: Sequence[ChunkKey] = ()
    load_from: int = 0
    loaded: int = 0
    """Chunks from `load_from` to before `loaded` have come from the node's store."""
    asked: int = 0
    """How often the store was asked."""
    prefilled: bool = False
    """The prompt's KV comes from a prefill replica; nothing is computed."""
    lease: Lease | None = None
    cached: int = 0
    """Prompt tokens that were in the engine's own blocks."""
    fetched: int = 0
    """Prompt tokens behind them whose KV was loaded."""
    computed: int = 0
    compute_s: float = 0.0
    """The seconds that its prompt took to compute, alone."""
    stored: Sequence[ChunkKey] = ()
    """Chunks that are in the engine since it computed them."""


@dataclass(slots=True)
class Happened:
    """What an engine did up to now, for the cluster to see."""

    first_tokens: list[Job] = field(default_factory=list)
    finished: list[Job] = field(default_factory=list)
    added: list[ChunkKey] = field(default_factory=list)
    removed: list[ChunkKey] = field(default_factory=list)


class Engine:
    """Call `advance` whenever the time of `next_at` has come, and read what `submit` and it return.

    A request takes the blocks of its prompt and of its whole answer when it begins, so that none must be preempted;
    nobody overtakes one that waits for blocks. Not thread-safe.
    """

    def __init__(
        self, times: EngineTimes, blocks: int, chunk_tokens: int, gaps: Gaps, load: Load | None = None
    ) -> None:
        self.pool = BlockPool(blocks)
        self._load = load
        self._times, self._chunk, self._gaps = times, chunk_tokens, gaps
        self._waiting: deque[Job] = deque()
        self._running: list[tuple[float, int, Job]] = []
        """A heap by the step at which the stream ends."""
        self._batch: list[Job] = []
        """Whose prompts are being computed."""
        self._batch_ends = 0.0
        self._batch_steps = 0
        self._batch_step_s = 0.0
        self._steps = 0.0
        self._at = 0.0
        self._step_s = 0.0
        self.prefill_rate = self.decode_rate = 0.0
        """Tokens per second while prefilling, and of one stream while nothing else goes on; 0 for never seen."""

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._batch)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def kv_used(self) -> float:
        return self.pool.held / self.pool.capacity

    def jobs(self) -> list[Job]:
        """All that are here, those without a first token first."""
        return [*self._batch, *self._waiting, *(job for _, _, job in self._running)]

    def blocks(self, prompt_tokens: int, output_tokens: int) -> int:
        return -(-(prompt_tokens + output_tokens) // self._chunk)

    def submit(self, job: Job, now: float, first: bool = False) -> Happened:
        """A request comes; its blocks must fit into the engine alone. `first`: it has had its turn, and loaded."""
        happened = Happened()
        self._pass(now)
        if first:
            self._waiting.appendleft(job)
        else:
            self._waiting.append(job)
        self._admit(happened)
        return happened

    def next_at(self) -> float | None:
        """When something ends; None while the engine does nothing."""
        if self._batch:
            end = min(self._batch_ends, self._running[0][0]) if self._running else self._batch_ends
        elif self._running:
            end = self._running[0][0]
        else:
            return None
        return self._at + max(0.0, end - self._steps) * self._step_s

    def advance(self, now: float) -> Happened:
        """End what ends by now."""
        happened = Happened()
        self._pass(now)
        due = self._steps + _SAME * max(1.0, self._steps)
        running = self._running
        while running and running[0][0] <= due:
            self._finish(heapq.heappop(running)[2], happened)
        if self._batch and self._batch_ends <= due:
            self._end_batch(happened)
        self._admit(happened)
        return happened

    def stop(self) -> list[Job]:
        """The engine is gone. Returns what it had, as `jobs` does."""
        left = self.jobs()
        self._waiting.clear()
        self._running.clear()
        self._batch = []
        self.pool.clear()
        self._set_step()
        return left

    def _pass(self, now: float) -> None:
        """Let time go on to now, in which nothing begins or ends."""
        passed = now - self._at
        self._at = now
        if self._step_s and passed > 0:
            steps = passed / self._step_s
            self._steps += steps
            if self._running:
                self._gaps.add(self._step_s, steps * len(self._running))

    def _admit(self, happened: Happened) -> None:
        if not self._batch:
            self._next_batch(happened)
        self._set_step()

    def _next_batch(self, happened: Happened) -> None:
        """Begin with the prompts that are first in line, as many as one step has room for, or one long one."""
        times = self._times
        tokens, seconds = 0, times.prefill_overhead_s
        while self._waiting and len(self._running) + len(self._batch) < times.max_running:
            job = self._waiting[0]
            if self._batch and tokens >= times.step_tokens:
                break
            if self._must_load(job):
                self._waiting.popleft()
                continue
            if not self._take_blocks(job, happened):
                break
            self._waiting.popleft()
            if job.prefilled:
                self._start_stream(job, happened)
                continue
            self._batch.append(job)
            tokens += job.computed
            seconds += job.compute_s
        if self._batch:
            steps = max(1, -(-tokens // times.step_tokens))
            self._batch_steps, self._batch_ends = steps, self._steps + steps
            self._batch_step_s = seconds / steps
            self._look_ahead()

    def _look_ahead(self) -> None:
        if self._load is None:
            return
        seen = [self._waiting.popleft() for _ in range(min(LOOK_AHEAD, len(self._waiting)))]
        self._waiting.extendleft(job for job in reversed(seen) if not self._must_load(job))

    def _must_load(self, job: Job) -> bool:
        if self._load is None or job.prefilled or job.asked >= MOST_ASKED:
            return False
        there = self.pool.match(job.keys)
        if job.asked and there >= job.load_from:
            return False
        job.asked += 1
        job.load_from, job.loaded = there, 0
        return self._load(job, there)

    def _take_blocks(self, job: Job, happened: Happened) -> bool:
        """The last token of a prompt is computed in any case, and with it its chunk."""
        most = min(len(job.keys), (job.prompt_tokens - 1) // self._chunk)
        admitted = self.pool.admit(job.keys, most, self.blocks(job.prompt_tokens, job.output_tokens))
        if admitted is None:
            return False
        job.lease = admitted.lease
        happened.removed += admitted.evicted
        shared = job.lease.shared
        fetched = max(0, min(job.loaded, most) - shared) if shared >= job.load_from else 0
        job.cached, job.fetched = shared * self._chunk, fetched * self._chunk
        if not job.prefilled:
            job.computed = job.prompt_tokens - job.cached - job.fetched
            job.compute_s = prefill_s(self._times, job.computed, job.cached + job.fetched)
        return True

    def _end_batch(self, happened: Happened) -> None:
        batch, self._batch = self._batch, []
        rate = sum(job.computed for job in batch) / (self._batch_step_s * self._batch_steps)
        self.prefill_rate += (rate - self.prefill_rate) * (0.2 if self.prefill_rate else 1.0)
        for job in batch:
            self._start_stream(job, happened)

    def _start_stream(self, job: Job, happened: Happened) -> None:
        assert job.lease is not None
        job.stored = self.pool.computed(job.lease)
        happened.added += job.stored
        happened.first_tokens.append(job)
        if job.output_tokens <= 1:
            self._finish(job, happened)
        else:
            heapq.heappush(self._running, (self._steps + job.output_tokens - 1, job.number, job))

    def _finish(self, job: Job, happened: Happened) -> None:
        assert job.lease is not None
        happened.added += self.pool.release(job.lease, job.answer)
        happened.finished.append(job)

    def _set_step(self) -> None:
        """A prefill and the streams share a step: the weights are read once for both."""
        streams, times = len(self._running), self._times
        if self._batch:
            self._step_s = self._batch_step_s
            if streams:
                self._step_s = max(self._batch_step_s, times.decode_step_s) + times.decode_stream_s * streams
        elif streams:
            self._step_s = times.decode_step_s + times.decode_stream_s * streams
            self.decode_rate = 1 / self._step_s
        else:
            self._step_s = 0.0

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks are held by jobs at work and by nobody else."""
        active = [*self._batch, *(job for _, _, job in self._running)]
        assert len(active) <= self._times.max_running
        assert all(job.lease is None for job in self._waiting)
        self.pool.check_integrity([job.lease for job in active if job.lease is not None])
        assert (self._step_s > 0) == bool(active)
