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
from workers.handover import Fetch, FirstHalf, Handover, prompt_digest
from workers.kv_events import KVEventSink
from workers.request_record import current_request
from workers.sim.app import SimApp
from workers.sim.block_cache import BlockCache, Content
from workers.sim.faults import Faults
from workers.sim.generation import EngineStoppedError, Generation, PromptTooLongError
from workers.sim.handover import appear, disappear, engine_id, is_there, sim_transfer
from workers.sim.scheduler import Scheduler
from workers.sim.sequence import Sampling
from workers.sim.sequence import Sequence as Stream
from workers.sim.tokens import RenderedPrompt
from workers.transfer import TransferConfig

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
        transfer: TransferConfig | None = None,
    ) -> None:
        """`transfer`: None where no prompt is computed by one engine for another."""
        self._config = config.sim
        self._hold_s = transfer.hold_s if transfer is not None and transfer.kind != "off" else 0
        self._id = engine_id()
        self._delayed: dict[Stream, asyncio.TimerHandle] = {}
        """Sequences whose KV is on its way."""
        self._holds: dict[str, asyncio.TimerHandle] = {}
        """Blocks that are kept for others, and when they are freed."""
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
        appear(self._id, self)

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
        fetch: Fetch | None = None,
    ) -> Generation:
        """Queue every prompt with every choice; with `fetch`, once the KV from there has come. Raises
        PromptTooLongError, and EngineStoppedError."""
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
        record = current_request.get()
        generation = Generation(streams, record)
        for stream in streams:
            self._owners[stream] = generation
            self.counters.prompt_tokens += stream.prompt_tokens
            if fetch is not None and self._may_fetch(fetch, stream):
                self._delay(stream, fetch.handover)
            else:
                self.scheduler.add(stream, now)
            if record is not None:
                record.begin_prefill(stream.expected_tokens, measured=True)
        self._publish()
        self._arm()
        return generation

    def abort(self, generation: Generation) -> None:
        """Stop the sequences that are not done, and free their blocks. Safe to call on one that is done."""
        now = self._clock()
        for stream in generation.streams:
            if self._owners.pop(stream, None) is not None:
                self._abort(stream, now)
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
        assert load.waiting + load.running + len(self._delayed) == len(self._owners)
        assert all(self.scheduler.keeps(name) for name in self._holds)

    # Prompts that are computed by one engine for another.

    def keep(self, half: FirstHalf, generation: Generation, adapter: str) -> None:
        """The generation was the prefill of a first half, with `Sampling.keep`: note what is kept now."""
        (stream,) = generation.streams
        tokens = stream.content.tokens[: stream.prompt_tokens]
        half.handover = Handover(
            half.name, self._id, half.name, len(tokens), prompt_digest(adapter, tokens), self._hold_s
        )
        loop = asyncio.get_running_loop()
        self._holds[half.name] = loop.call_later(self._hold_s, self._let_go, half.name)

    def keeps(self, name: str) -> bool:
        return self.scheduler.keeps(name)

    async def release(self, handover: Handover) -> None:
        self._let_go(handover.request)

    def _let_go(self, name: str) -> None:
        hold = self._holds.pop(name, None)
        if hold is not None:
            hold.cancel()
            self.scheduler.let_go(name, self._clock())
            self._publish()
            self._arm()

    def _may_fetch(self, fetch: Fetch, stream: Stream) -> bool:
        """What is there is checked once it should have come, as a transfer fails in the middle."""
        content = stream.content
        if content.media or fetch.handover.digest != prompt_digest(content.adapter, content.tokens):
            fetch.skipped = "it is of another prompt"
        elif time.monotonic() >= fetch.until:
            fetch.skipped = "it came too late"
        return not fetch.skipped

    def _delay(self, stream: Stream, handover: Handover) -> None:
        """Queue the sequence when the KV that it lacks has come."""
        content, block = stream.content, self.blocks.block_tokens
        content.extend_chain(len(content.tokens) - 1, block)
        missing = max(0, handover.tokens - self.blocks.match(content.chain) * block)
        stream.expected_tokens = 1
        self._delayed[stream] = asyncio.get_running_loop().call_later(
            missing / self._config.transfer_tokens_per_s, self._arrive, stream, handover
        )

    def _arrive(self, stream: Stream, handover: Handover) -> None:
        del self._delayed[stream]
        if is_there(handover):
            stream.fetched_tokens = handover.tokens
        self.scheduler.add(stream, self._clock())
        self._publish()
        self._arm()

    def _abort(self, stream: Stream, now: float) -> None:
        delayed = self._delayed.pop(stream, None)
        if delayed is None:
            self.scheduler.abort(stream, now)
        else:
            delayed.cancel()

    def _describe(self, model: ModelConfig, cache: CacheConfig) -> EngineInfo:
        sim, name = self._config, model.served_name or _DEFAULT_NAME
        adapters = {public: _engine_name(public, folder) for public, folder in model.adapters.items()}
        identity = EngineIdentity(
            model=f"sim:{name}",
            kv_dtype="none",
            layers=1,
            kv_heads=1,
            head_size=1,
            block_tokens=sim.block_tokens,
            chunk_tokens=cache.chunk_tokens,
            layout="sim",
            platform="sim",
        )
        return EngineInfo(
            identity=identity,
            block_tokens=sim.block_tokens,
            # A sequence must fit into the cache alone, or it would wait for ever.
            max_model_len=min(sim.max_model_len, sim.blocks * sim.block_tokens),
            models=(name, *adapters),
            adapters=adapters,
            transfer=sim_transfer(self._id, identity) if self._hold_s else None,
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
        disappear(self._id)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for name in list(self._holds):
            self._holds.pop(name).cancel()
            self.scheduler.let_go(name, self._clock())
        for generation in dict.fromkeys(self._owners.values()):
            generation.fail(error)
        now = self._clock()
        for stream in self._owners:
            self._abort(stream, now)
        self._owners.clear()


def _engine_name(public: str, folder: str) -> str:
    """A simulated adapter has no weights; the name of its folder stands for them."""
    return f"{public}@{hashlib.blake2b(folder.encode(), digest_size=8).hexdigest()}"
