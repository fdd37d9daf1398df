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
from workers.http import ReplicaApp
from workers.kv_events import KVEvent
from workers.messages import ReplicaInfo, Role
from workers.stored_responses import ResponseGuard

_LOAD_PERIOD_S = 0.1
_LOAD_SILENCE_S = 1.0


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
        self.app = ReplicaApp(
            ResponseGuard(self.engine.app), self.publisher, self._secret, self._set_cordoned
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
        )

    def _on_kv_events(self, events: Sequence[KVEvent]) -> None:
        if self._tracker is None:
            self._early.extend(events)
            return
        change = self._tracker.apply(events)
        self.publisher.apply("hbm", change.added, change.removed, change.cleared)

    def load(self) -> Load:
        now = self.engine.load()
        return Load(
            waiting=now.waiting,
            running=now.running,
            prefill_tokens=now.prefill_tokens,
            kv_used=round(now.kv_used, 4),
            prefill_rate=now.prefill_rate,
            decode_rate=now.decode_rate,
            http_requests=self.app.open_requests,
            draining=self.draining or self.cordoned or self.sick,
        )

    def _set_cordoned(self, cordoned: bool) -> bool:
        self.cordoned = cordoned
        load = self.load()
        self.publisher.report(load)
        return load.draining

    async def _report_load(self) -> None:
        last, sent_at = None, 0.0
        while True:
            load = self.load()
            if load != last or time.monotonic() - sent_at >= _LOAD_SILENCE_S:
                self.publisher.report(load)
                last, sent_at = load, time.monotonic()
            await asyncio.sleep(_LOAD_PERIOD_S)

    async def drain(self, timeout_s: float) -> int:
        """Take nothing new, wait for open requests. Returns how many were still open when the time was up."""
        self.draining = True
        self.publisher.report(self.load())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.app.idle.wait()
        return self.app.open_requests

    async def stop(self) -> None:
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.gather(self._reporter, return_exceptions=True)
        await self.engine.shutdown()
