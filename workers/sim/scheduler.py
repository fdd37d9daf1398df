"""Continuous batching in simulated time.

Prefills run one at a time, in order of arrival, beside the decode steps of all running streams. The scheduler
holds no clock and sleeps nowhere: it says when something is next due, and does that when it is told the time.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from workers.config import SimConfig
from workers.engine import EngineLoad
from workers.rates import RateMeter
from workers.sim.block_cache import BlockCache, Lease
from workers.sim.latency import LatencyModel
from workers.sim.sequence import Sequence


class _Prefill(NamedTuple):
    sequence: Sequence
    tokens: int
    started: float
    ends: float


class _DecodeStep(NamedTuple):
    started: float
    ends: float


class Scheduler:
    """Times are seconds of the caller's clock; they must not go backwards."""

    def __init__(self, config: SimConfig, cache: BlockCache) -> None:
        self._cache = cache
        self._latency = LatencyModel.of(config)
        self._max_running = config.max_running
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._prefill: _Prefill | None = None
        self._step: _DecodeStep | None = None
        self._kept: dict[str, Lease] = {}
        self._prefill_meter = RateMeter()
        self._decode_meter = RateMeter()
        self.preemptions = 0
        self.computed_tokens = 0
        """Prompt tokens computed so far."""
        self.cached_tokens = 0
        """Prompt tokens found in the cache so far."""
        self.fetched_tokens = 0
        """Prompt tokens that came from other engines so far."""

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence. It must fit into the cache alone."""
        content, block = sequence.content, self._cache.block_tokens
        content.extend_chain(len(content.tokens) - 1, block)
        sequence.expected_tokens = len(content.tokens) - self._cache.match(content.chain) * block
        self._waiting.append(sequence)
        self._start_prefill(now)

    def abort(self, sequence: Sequence, now: float) -> None:
        """Forget a sequence and free its blocks. No effect on one that has finished."""
        if sequence.finished:
            return
        sequence.finish_reason = "abort"
        if self._prefill is not None and self._prefill.sequence is sequence:
            self._prefill = None
        elif sequence.lease is None:
            self._waiting.remove(sequence)
        else:
            self._running.remove(sequence)
            if not self._running:
                self._step = None
        self._release(sequence)
        self._start_prefill(now)

    def keeps(self, name: str) -> bool:
        """Whether blocks are kept under that name for another engine."""
        return name in self._kept

    def let_go(self, name: str, now: float) -> None:
        """Free the blocks that are kept under that name, if any."""
        lease = self._kept.pop(name, None)
        if lease is not None:
            self._cache.release(lease)
            self._start_prefill(now)

    def next_at(self) -> float | None:
        """When the next thing is due; None while there is nothing to do."""
        times = [due.ends for due in (self._prefill, self._step) if due is not None]
        return min(times, default=None)

    def advance(self, now: float) -> list[Sequence]:
        """Do all that is due by `now`. Returns the sequences that have new output, each once."""
        touched: dict[Sequence, None] = {}
        prefilled, prefill_started = 0, now
        steps, decode_started = 0, now
        while (at := self.next_at()) is not None and at <= now:
            if self._prefill is not None and self._prefill.ends <= at:
                prefilled += self._prefill.tokens
                prefill_started = min(prefill_started, self._prefill.started)
                touched[self._finish_prefill(self._prefill)] = None
            elif self._step is not None:
                steps += 1
                decode_started = min(decode_started, self._step.started)
                touched.update(dict.fromkeys(self._finish_step(self._step)))
        self._prefill_meter.note(prefilled, now - prefill_started)
        self._decode_meter.note(steps, now - decode_started)
        return list(touched)

    def load(self, now: float) -> EngineLoad:
        return EngineLoad(
            waiting=len(self._waiting),
            running=len(self._running) + (self._prefill is not None),
            kv_used=self._cache.used / self._cache.capacity,
            prefill_rate=self._prefill_meter.rate,
            decode_rate=self._decode_meter.rate,
        )

    def _start_prefill(self, at: float) -> None:
        """Admit the first in line where the lane, a seat and its blocks are free; nobody overtakes it."""
        if self._prefill is not None or not self._waiting or len(self._running) >= self._max_running:
            return
        sequence = self._waiting[0]
        lease = self._cache.acquire(sequence.content, self._blocks(len(sequence.content.tokens)))
        if lease is None:
            return
        self._waiting.popleft()
        cached = len(lease.held) * self._cache.block_tokens
        if not sequence.generated:
            sequence.cached_tokens = cached
            self.cached_tokens += cached
        sequence.lease = lease
        fetched = max(0, min(sequence.fetched_tokens, len(sequence.content.tokens) - 1) - cached)
        if not sequence.generated:
            sequence.fetched_tokens = fetched
            self.fetched_tokens += fetched
        tokens = len(sequence.content.tokens) - cached - fetched
        started = max(at, sequence.arrival)
        self._prefill = _Prefill(sequence, tokens, started, started + self._latency.prefill_s(tokens))

    def _finish_prefill(self, prefill: _Prefill) -> Sequence:
        sequence, at = prefill.sequence, prefill.ends
        assert sequence.lease is not None
        self._prefill = None
        self.computed_tokens += prefill.tokens
        sequence.computed = len(sequence.content.tokens)
        self._cache.store(sequence.lease, sequence.content, sequence.computed)
        sequence.sample()
        if sequence.finished:
            self._end(sequence)
        else:
            sequence.joined_at = at
            self._running.append(sequence)
            if self._step is None:
                self._start_step(at)
        self._start_prefill(at)
        return sequence

    def _start_step(self, at: float) -> None:
        self._step = None
        if self._running:
            self._step = _DecodeStep(at, at + self._latency.decode_step_s(len(self._running)))

    def _finish_step(self, step: _DecodeStep) -> list[Sequence]:
        decoded = []
        for sequence in list(self._running):
            # One that joined while the step was under way waits for the next.
            if sequence.joined_at <= step.started and self._take_block(sequence):
                self._decode(sequence)
                decoded.append(sequence)
        self._running = [sequence for sequence in self._running if not sequence.finished]
        self._start_step(step.ends)
        self._start_prefill(step.ends)
        return decoded

    def _decode(self, sequence: Sequence) -> None:
        assert sequence.lease is not None
        sequence.computed += 1
        if sequence.computed % self._cache.block_tokens == 0:
            self._cache.store(sequence.lease, sequence.content, sequence.computed)
        sequence.sample()
        if sequence.finished:
            self._end(sequence)

    def _take_block(self, sequence: Sequence) -> bool:
        """A block for the next token, at the cost of the youngest streams; False when it was itself the
        youngest, or had given way to another in this step."""
        if sequence.lease is None:
            return False
        if self._blocks(sequence.computed + 1) <= sequence.lease.blocks:
            return True
        while not self._cache.grow(sequence.lease):
            youngest = next(each for each in reversed(self._running) if not each.finished)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; what it has said stays said, and its KV is computed again."""
        self.preemptions += 1
        self._running.remove(sequence)
        self._release(sequence)
        sequence.computed = 0
        self._waiting.appendleft(sequence)

    def _end(self, sequence: Sequence) -> None:
        keep = sequence.sampling.keep
        if keep and sequence.lease is not None:
            self._kept[keep], sequence.lease = sequence.lease, None
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            self._cache.release(sequence.lease)
            sequence.lease = None

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._cache.block_tokens)

    def check_integrity(self) -> None:
        """Assert that every block in use belongs to a sequence at work, and that nothing else is kept."""
        active = [*self._running] + ([self._prefill.sequence] if self._prefill is not None else [])
        assert len(active) <= self._max_running
        assert all(not sequence.finished for sequence in (*active, *self._waiting))
        assert all(sequence.lease is None for sequence in self._waiting)
        assert (self._step is not None) == bool(self._running)
        leases = [sequence.lease for sequence in active if sequence.lease is not None]
        self._cache.check_integrity([*leases, *self._kept.values()])
