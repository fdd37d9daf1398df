"""One replica: an engine, its HTTP application and its event stream."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Sequence

from cache_store.config import CacheConfig
from cache_store.events import Load
from cache_store.stream import Publisher
from workers.chunk_tracker import ChunkTracker
from workers.engine import Engine
from workers.handovers import Handovers
from workers.http import ReplicaApp
from workers.kv_events import KVEvent
from workers.messages import ReplicaInfo, Role
from workers.open_requests import OpenRequests
from workers.stored_responses import ResponseGuard

_LEAST_GAP_S = 0.05
"""Between two load reports, however much happens."""
_BUSY_PERIOD_S = 0.25
"""An engine at work is looked at so often; of requests that come and go it is told at once."""
_SILENCE_S = 1.0


class HostedReplica:
    """Everything of one replica but its socket. Call order: start, drain, stop."""

    def __init__(
        self,
        replica_id: str,
        role: Role,
        engine: Engine,
        cache: CacheConfig,
        secret: str,
        loses: Callable[[], bool] | None = None,
    ) -> None:
        """`loses`: see `cache_store.stream.Publisher`."""
        self.id = replica_id
        self.role: Role = role
        self.engine = engine
        self.draining = False
        """It stops, once what is open has ended."""
        self.cordoned = False
        """An operator drains it. Unlike `draining` this can be undone, and the replica goes on without requests."""
        self.sick = False
        """The last health check failed. Serve takes a while to replace a replica; nothing new should come meanwhile."""
        self._cache = cache
        self._secret = secret
        self._loses = loses
        self._early: list[KVEvent] = []
        self._tracker: ChunkTracker | None = None
        self._reporter: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.requests = OpenRequests(self._changed.set)
        self.handovers: Handovers | None = None
        """None where no prompts are computed for other replicas."""

    app: ReplicaApp
    publisher: Publisher

    async def start(self) -> None:
        """Raises whatever keeps the engine from starting, and ValueError for a chunk that no whole number of the
        engine's blocks makes."""
        await self.engine.start(self._on_kv_events)
        info = self.engine.info
        if self._cache.chunk_tokens % info.block_tokens:
            raise ValueError(
                f"cache.chunk_tokens is {self._cache.chunk_tokens}; needed: a multiple of the engine's block of "
                f"{info.block_tokens} tokens"
            )
        identity = info.identity.digest()
        self.publisher = Publisher(
            holder=self.id,
            epoch=secrets.randbits(63),
            identity=identity,
            chunk_tokens=self._cache.chunk_tokens,
            tiers=("hbm",),
            loses=self._loses,
        )
        self._tracker = ChunkTracker(identity, info.block_tokens, self._cache.chunk_tokens)
        if info.transfer is not None:
            self.handovers = Handovers(self.engine.release)
        self.app = ReplicaApp(
            ResponseGuard(self.engine.app),
            self.publisher,
            self._secret,
            self._set_cordoned,
            self.requests,
            self.handovers,
        )
        self._on_kv_events(self._early)
        self._early = []
        self._reporter = asyncio.create_task(self._report_load())

    def describe(self, node: str, address: str) -> ReplicaInfo:
        info = self.engine.info
        return ReplicaInfo(
            id=self.id,
            role=self.role,
            node=node,
            address=address,
            models=info.models,
            adapters=info.adapters,
            max_model_len=info.max_model_len,
            ranks=info.identity.tensor_parallel * info.identity.pipeline_parallel,
            transfer=info.transfer,
            no_transfer=info.no_transfer,
        )

    def _on_kv_events(self, events: Sequence[KVEvent]) -> None:
        if self._tracker is None:
            self._early.extend(events)
            return
        change = self._tracker.apply(events)
        self.publisher.apply("hbm", change.added, change.removed, change.cleared)

    def load(self) -> Load:
        now = self.engine.load()
        counts = self.requests.counts(now.prefill_rate)
        return Load(
            waiting=now.waiting,
            running=now.running,
            prefill_tokens=counts.prefill_tokens,
            kv_used=round(now.kv_used, 4),
            prefill_rate=now.prefill_rate,
            decode_rate=now.decode_rate,
            http_requests=counts.requests,
            draining=self.draining or self.cordoned or self.sick,
            prefilling=counts.prefilling,
            shares=counts.shares,
        )

    def _set_cordoned(self, cordoned: bool) -> bool:
        self.cordoned = cordoned
        load = self.load()
        self.publisher.report(load)
        return load.draining

    async def _report_load(self) -> None:
        last, sent_at = None, 0.0
        while True:
            self._changed.clear()
            load, now = self.load(), time.monotonic()
            if load != last or now - sent_at >= _SILENCE_S:
                self.publisher.report(load)
                last, sent_at = load, now
            await asyncio.sleep(_LEAST_GAP_S)
            busy = load.http_requests or load.waiting or load.running
            look_after = (_BUSY_PERIOD_S if busy else _SILENCE_S) - _LEAST_GAP_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(look_after):
                    await self._changed.wait()

    async def drain(self, timeout_s: float) -> int:
        """Take nothing new, wait for open requests and for prompts to be fetched that are kept for others. Returns how
        many requests were still open when the time was up."""
        self.draining = True
        self.publisher.report(self.load())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.app.idle.wait()
                if self.handovers is not None:
                    await self.handovers.empty(timeout_s)
        return self.app.open_requests

    async def stop(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.gather(self._reporter, return_exceptions=True)
        await self.engine.shutdown()
