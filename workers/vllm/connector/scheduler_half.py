"""The half of the connector that decides. It lives on the scheduler's thread, where nothing may wait.

Speaks of vLLM's requests and scheduler output by their attributes only, so that it runs without vLLM.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from cache_store.load_cost import chunks_worth_loading
from cache_store.wire import TIER_NAMES, Source
from workers.prompt_keys import KeyChain, shareable_tokens
from workers.rates import RateMeter
from workers.vllm.connector.counts import Counts
from workers.vllm.connector.lookups import Keys, Lookups
from workers.vllm.connector.metadata import StepReport, StepWork
from workers.vllm.connector.request_state import Facts, Geometry
from workers.vllm.connector.requests import RequestTable
from workers.vllm.connector.settings import Settings
from workers.vllm.connector.store import LookupStore

logger = logging.getLogger(__name__)

PARAMS = "manta"
"""Under this name a request's `kv_transfer_params` hold a `Hints`."""
_WITH_CONTENT = re.compile(r".+@[0-9a-f]{32}")
"""How `workers.vllm.adapters` names an adapter: by name and content."""
_PREFILL_STEP_TOKENS = 64
"""Steps of so many tokens tell how fast the engine computes prompts."""


class Hints(msgspec.Struct, frozen=True):
    """What the router's plan says of a request. It can cost time, and never makes KV be used that is not the
    request's: keys come from the engine's own tokens."""

    id: str = ""
    """Under which the admission is told to the replica."""
    tenant: str = ""
    sources: tuple[Source, ...] = ()
    skip_save: int = 0


class SchedulerHalf:
    """See vLLM's `KVConnectorBase_V1` for when each method is called."""

    def __init__(
        self,
        settings: Settings,
        identity: bytes,
        block_tokens: int,
        workers: int,
        store: LookupStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`identity` is the engine identity's digest; `workers` the ranks that each hold a part of every chunk."""
        self.counts = Counts()
        self._settings = settings
        self._identity = identity
        self._store = store
        self._clock = clock
        self._table = RequestTable(
            Geometry(settings.chunk_tokens, block_tokens),
            workers,
            self._worth,
            lookup_limit_s=settings.lookup_limit_s,
        )
        self._lookups = Lookups(store, workers, settings.lookup_limit_s)
        self._live: dict[str, Any] = {}
        """vLLM's requests, from their arrival to their end."""
        self._salt = ""
        """Not empty once KV from before a reset must not be loaded any more."""
        self._steps: deque[tuple[float, int]] = deque(maxlen=8)
        """Start and tokens of steps whose output is not there yet."""
        self._last_output = 0.0
        self._prefill = RateMeter()

    def new_request(self, request: Any) -> None:
        name = request.request_id
        if name in self._table:
            return
        self._live[name] = request
        adapter = request.lora_request.lora_name if request.lora_request is not None else ""
        salt = (request.cache_salt or "") + self._salt
        self._lookups.begin(
            name, lambda: KeyChain(self._identity, self._settings.chunk_tokens, adapter, salt)
        )
        self._table.add(name, _facts(request), request.num_prompt_tokens)
        self._work()

    def match(self, request: Any, local: int) -> int | None:
        """Tokens to be loaded beyond `local`; None to be asked again."""
        if request.request_id not in self._live:
            self.new_request(request)
        self._take_results()
        answer = self._table.ask(request.request_id, local, request.num_tokens, self._clock())
        self._work()
        return answer

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        self._table.admitted(request.request_id, external, blocks)
        self._work()

    def step(self, output: Any) -> StepWork:
        """What the workers have to do with this step of the engine."""
        self._take_results()
        preempted = set(output.preempted_req_ids or ())
        for name in preempted:
            self._table.preempted(name)
        self._note_blocks(output)
        for name in output.num_scheduled_tokens:
            request = self._live.get(name)
            if request is not None:
                self._table.computed(name, _confirmed(request))
        self._work()
        self._steps.append((self._clock(), output.total_num_scheduled_tokens))
        return StepWork(
            identity=self._identity,
            loads=self._table.take_loads(),
            saves=self._table.take_saves(self._chunk_seconds),
            preempted=preempted,
            cancelled=self._table.take_cancelled(),
            closing=self._table.take_closing(),
        )

    def output(
        self,
        report: StepReport | None,
        received: Iterable[str],
        sent: Iterable[str],
        invalid_blocks: set[int],
    ) -> None:
        """What the workers have done, once for every `step`. All of them have named `received` and `sent`."""
        self._take_results()
        self._note_step()
        if report is not None:
            self._note_report(report)
        if invalid_blocks:
            self._table.invalid(invalid_blocks)
        for name in received:
            for tier, tokens in self._table.load_done(name).items():
                self.counts.add("loaded_tokens", TIER_NAMES[tier], tokens)
        for name in sent:
            self._table.closed(name)
        self._work()

    def finished(self, request: Any, aborted: bool) -> bool:
        """Whether the request's blocks have to be kept until the workers name it as sent."""
        name = request.request_id
        held = self._table.finished(name, 0 if aborted else _confirmed(request))
        self._work()
        return held

    def reset(self) -> None:
        """Load nothing any more that was saved until now, by whomever: the KV is said to be out of date."""
        self._salt = f"\0reset {uuid.uuid4().hex}"
        self._table.known.clear()
        logger.warning(
            "KV that was saved until now is not loaded any more by engine %s", self._settings.engine
        )

    def close(self) -> None:
        self._lookups.close()
        self._store.close()

    def check_integrity(self) -> None:
        """Raises AssertionError when the structures contradict themselves or each other."""
        self._table.check_integrity()
        assert self._live.keys() == {name for name in self._live if name in self._table}

    @property
    def at_rest(self) -> bool:
        """Nothing is known of any request."""
        return not len(self._table)

    @property
    def _chunk_seconds(self) -> float:
        return self._settings.chunk_tokens / self._prefill.rate if self._prefill.rate else 0.0

    def _worth(self, tiers: bytes, bytes_per_chunk: int, seconds: Sequence[float], local: int) -> int:
        if self._settings.load_when == "always":
            return len(tiers)
        return chunks_worth_loading(
            tiers,
            bytes_per_chunk,
            self._settings.chunk_tokens,
            seconds,
            self._prefill.rate,
            local_tokens=local,
        )

    def _take_results(self) -> None:
        results, now = self._lookups.results, self._clock()
        while results:
            result = results.popleft()
            if isinstance(result, Keys):
                if result.keys is None:
                    self._table.keys_failed(result.request)
                else:
                    self._table.keys_known(result.request, result.namespace, result.keys)
            else:
                self.counts.add("lookups", "answered" if result.found is not None else "failed")
                self._table.answered(result.request, result.serial, result.found, now)

    def _work(self) -> None:
        """Set off what the table wants, and let go of what it has forgotten."""
        for hashes in self._table.take_hashes():
            tokens, first, end = self._tokens(*hashes)
            self._lookups.hash(hashes.request, tokens, first, end)
        for lookup in self._table.take_lookups():
            self._lookups.ask(lookup)
        for lease in self._table.take_leases():
            self._lookups.release(lease)
        for admission in self._table.take_admissions():
            self.counts.admitted(admission)
        for name in self._table.take_forgotten():
            self._live.pop(name, None)
            self._lookups.forget(name)
        timed_out, self._table.timed_out = self._table.timed_out, 0
        if timed_out:
            self.counts.add("lookups", "late", timed_out)

    def _tokens(self, name: str, first: int, end: int) -> tuple[Sequence[int], int, int]:
        """A sequence that will not change, and where in it the tokens of chunks [first, end) are."""
        request, size = self._live[name], self._settings.chunk_tokens
        if end * size <= request.num_prompt_tokens and request.prompt_token_ids is not None:
            return request.prompt_token_ids, first * size, end * size
        return request.all_token_ids[first * size : end * size], 0, (end - first) * size

    def _note_blocks(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self._table.scheduled(new.req_id, new.num_computed_tokens)
            self._table.set_blocks(new.req_id, new.block_ids[0], more=False)
        cached = output.scheduled_cached_reqs
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._table.set_blocks(name, blocks[0] if blocks else (), more=False)
            elif blocks:
                self._table.set_blocks(name, blocks[0], more=True)

    def _note_step(self) -> None:
        if not self._steps:
            return
        (started, tokens), now = self._steps.popleft(), self._clock()
        if tokens >= _PREFILL_STEP_TOKENS:
            self._prefill.note(tokens, now - max(started, self._last_output))
        self._last_output = now

    def _note_report(self, report: StepReport) -> None:
        for result in report.loads:
            self._table.loaded(result)
            if result.failure and result.failure != "cancelled":
                self.counts.add("load_failures", result.failure)
        for tier, nbytes in report.loaded_bytes.items():
            self.counts.add("loaded_bytes", TIER_NAMES[tier], nbytes)
        for name, saves in report.gathered.items():
            self._table.gathered(name, saves)
        for key, outcome in report.saved:
            self.counts.add("saved_chunks", outcome)
            self._table.saved(key, there=outcome != "dropped")


def _facts(request: Any) -> Facts:
    """What a vLLM request is to the connector. Params that are not understood are none."""
    params = request.kv_transfer_params or {}
    try:
        hints = msgspec.convert(params.get(PARAMS) or {}, Hints)
    except (msgspec.ValidationError, AttributeError):
        hints = Hints()
    shareable = shareable_tokens(
        request.num_prompt_tokens if request.prompt_token_ids is not None else None,
        [(feature.mm_position.offset, feature.mm_position.length) for feature in request.mm_features],
        request.prompt_is_token_ids,
    )
    if request.resumable:
        # The client goes on writing to it: its prompt is not what it will be.
        shareable = 0
    if request.lora_request is not None and not _WITH_CONTENT.fullmatch(request.lora_request.lora_name):
        # Loaded behind our back: another adapter may have the same name.
        shareable = 0
    # A prompt that another engine has computed comes whole from there.
    loads_elsewhere = bool(params.get("do_remote_prefill"))
    return Facts(
        shareable=shareable,
        may_load=not loads_elsewhere and not request.skip_reading_prefix_cache,
        tenant=hints.tenant,
        sources=hints.sources,
        skip_save=max(hints.skip_save, 0),
        tag=hints.id,
    )


def _confirmed(request: Any) -> int:
    """Leading tokens whose KV has been computed by steps that are over, and that no step can take back."""
    computed: int = request.num_computed_tokens - request.num_in_flight_tokens
    tokens: int = request.num_tokens
    return min(tokens, max(computed, 0))
