"""`SimEngine`: the simulated engine behind the seam of `workers.engine`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from starlette.types import ASGIApp

from cache_store.config import CacheConfig
from cache_store.keys import EngineIdentity
from workers.config import EngineConfig, ModelConfig
from workers.engine import EngineInfo, EngineLoad, EngineUnhealthyError
from workers.kv_events import KVEventSink
from workers.request_record import current_request
from workers.sim.app import SimApp
from workers.sim.block_cache import BlockCache, Content
from workers.sim.faults import Faults
from workers.sim.generation import EngineStoppedError, Generation, PromptTooLongError
from workers.sim.scheduler import Scheduler
from workers.sim.sequence import Sampling
from workers.sim.sequence import Sequence as Stream
from workers.sim.tokens import RenderedPrompt

logger = logging.getLogger(__name__)

_DEFAULT_NAME = "sim"


@dataclass
class Counters:
    """Totals since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0


class SimEngine:
    """See `workers.engine.Engine`. It has no task: one timer is armed for what is next due, and none while it
    is idle."""

    app: ASGIApp
    info: EngineInfo

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        cache: CacheConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config.sim
        self._clock = clock
        self._sink: KVEventSink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due: float | None = None
        self._error: Exception | None = None
        self._owners: dict[Stream, Generation] = {}
        self.faults = Faults()
        self.counters = Counters()
        self.blocks = BlockCache(self._config.blocks, self._config.block_tokens)
        self.scheduler = Scheduler(self._config, self.blocks)
        self.info = self._describe(model, cache)
        self.app = SimApp(self)

    async def start(self, sink: KVEventSink) -> None:
        self._sink = sink

    async def check_health(self) -> None:
        if self.faults.kind == "unhealthy":
            raise EngineUnhealthyError("the simulated engine has the fault `unhealthy`")
        if self._error is not None:
            raise EngineUnhealthyError(f"the simulated engine stopped: {self._error!r}")
        if self._sink is None:
            raise EngineUnhealthyError("the simulated engine is not started")

    def load(self) -> EngineLoad:
        return self.scheduler.load(self._clock())

    async def shutdown(self) -> None:
        self._stop(EngineStoppedError("the engine is shut down"))

    def submit(
        self,
        prompts: Sequence[RenderedPrompt],
        choices: Sequence[Sampling],
        *,
        adapter: str = "",
        salt: str = "",
    ) -> Generation:
        """Queue every prompt with every choice. Raises PromptTooLongError, and EngineStoppedError."""
        if self._sink is None:
            raise EngineStoppedError("the engine is not running")
        for prompt in prompts:
            if len(prompt.tokens) >= self.info.max_model_len:
                raise PromptTooLongError(len(prompt.tokens), self.info.max_model_len)
        now = self._clock()
        streams = [
            Stream(
                # What is said after a prompt without media is as shareable as the prompt.
                Content(
                    array("I", prompt.tokens),
                    salt,
                    adapter,
                    prompt.shareable if prompt.media else None,
                    prompt.media,
                ),
                self._within_context(choice, len(prompt.tokens)),
                now,
            )
            for prompt in prompts
            for choice in choices
        ]
        generation = Generation(streams, current_request.get())
        for stream in streams:
            self._owners[stream] = generation
            self.counters.prompt_tokens += stream.prompt_tokens
            self.scheduler.add(stream, now)
        self._publish()
        self._arm()
        return generation

    def abort(self, generation: Generation) -> None:
        """Stop the sequences that are not done, and free their blocks. Safe to call on one that is done."""
        now = self._clock()
        for stream in generation.streams:
            if self._owners.pop(stream, None) is not None:
                self.scheduler.abort(stream, now)
                self.counters.aborted += 1
        generation.close()
        self._publish()
        self._arm()

    @property
    def open_streams(self) -> int:
        """Sequences that wait or run."""
        return len(self._owners)

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        assert all(not stream.finished for stream in self._owners)
        load = self.load()
        assert load.waiting + load.running == len(self._owners)

    def _describe(self, model: ModelConfig, cache: CacheConfig) -> EngineInfo:
        sim, name = self._config, model.served_name or _DEFAULT_NAME
        adapters = {public: _engine_name(public, folder) for public, folder in model.adapters.items()}
        return EngineInfo(
            identity=EngineIdentity(
                model=f"sim:{name}",
                kv_dtype="none",
                layers=1,
                kv_heads=1,
                head_size=1,
                block_tokens=sim.block_tokens,
                chunk_tokens=cache.chunk_tokens,
                layout="sim",
                platform="sim",
            ),
            block_tokens=sim.block_tokens,
            # A sequence must fit into the cache alone, or it would wait for ever.
            max_model_len=min(sim.max_model_len, sim.blocks * sim.block_tokens),
            models=(name, *adapters),
            adapters=adapters,
        )

    def _within_context(self, choice: Sampling, prompt_tokens: int) -> Sampling:
        return replace(choice, max_tokens=min(choice.max_tokens, self.info.max_model_len - prompt_tokens))

    def _arm(self) -> None:
        due = self.scheduler.next_at()
        if due == self._due and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._due = None, due
        if due is not None and self._sink is not None:
            delay = max(0.0, due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        try:
            streams = self.scheduler.advance(self._clock())
            # Events first: who gets a token may count on the index knowing its prefix soon.
            self._publish()
            for stream in streams:
                self._deliver(stream)
        except Exception as error:
            logger.exception("the simulated engine stops")
            self._error = error
            self._stop(EngineStoppedError(f"the engine stopped: {error!r}"))
            return
        self._arm()

    def _deliver(self, stream: Stream) -> None:
        generation = self._owners[stream]
        self.counters.generated_tokens += generation.deliver(stream)
        if stream.finished:
            del self._owners[stream]
            self.counters.finished += 1

    def _publish(self) -> None:
        events = self.blocks.take_events()
        if events and self._sink is not None:
            self._sink(events)

    def _stop(self, error: EngineStoppedError) -> None:
        self._sink = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for generation in dict.fromkeys(self._owners.values()):
            generation.fail(error)
        now = self._clock()
        for stream in self._owners:
            self.scheduler.abort(stream, now)
        self._owners.clear()


def _engine_name(public: str, folder: str) -> str:
    """A simulated adapter has no weights; the name of its folder stands for them."""
    return f"{public}@{hashlib.blake2b(folder.encode(), digest_size=8).hexdigest()}"
