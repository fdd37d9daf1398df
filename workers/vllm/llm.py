"""`ObservedLLM`: vLLM's AsyncLLM with our eyes in it.

The one place where a request's outputs pass on their way from the engine to the OpenAI application: tokens are
counted here, rates are measured here, and a stream that has to go on elsewhere will be resumed here.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from workers.admissions import Admissions, Admitted
from workers.rates import RateMeter
from workers.request_record import current_request
from workers.vllm.halves import (
    KEEP,
    adapter_of,
    begin_first_half,
    begin_second_half,
    check_source,
    end_first_half,
    one_token,
    set_transfer,
)
from workers.vllm.prompt_adapter import set_salt


class ObservedLLM(AsyncLLM):
    """Notes the first output of every sequence in the request's record, and measures rates."""

    prefill_rate: RateMeter
    decode_rate: RateMeter
    admissions: Admissions | None
    """What the engine's KV connector tells; None without one."""

    hold_s: float
    """How long the engine keeps a prompt for another one; 0 where it does not."""

    def observe(self, admissions: Admissions | None = None, hold_s: float = 0.0) -> None:
        """Start measuring; called once, before the first request."""
        self.admissions = admissions
        self.hold_s = hold_s
        self.prefill_rate = RateMeter()
        self.decode_rate = RateMeter()

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        set_salt(prompt)
        record = current_request.get()
        if record is not None:
            record.begin_prefill(_prompt_tokens(prompt), measured=False)
        half = record.first_half if record is not None else None
        adapter, fetched, transfer = adapter_of(kwargs.get("lora_request")), None, {}
        if half is not None:
            sampling_params, transfer = begin_first_half(half, prompt, sampling_params), KEEP
        elif record is not None and record.fetch is not None:
            # Of several calls for one request the first one's prompt is the one that was rendered.
            fetch, record.fetch = record.fetch, None
            await check_source(fetch)
            transfer = begin_second_half(fetch, prompt, sampling_params, adapter)
            if transfer and sampling_params.n > 1:
                fetched, transfer = await self._fetch(prompt, transfer, kwargs), {}
        tag = self._tag(sampling_params, transfer)
        first = last = admitted = None
        try:
            async for output in super().generate(prompt, sampling_params, *args, **kwargs):
                if first is None:
                    first = output
                    admitted = await self._admitted(tag)
                    admitted = fetched or admitted
                    self._note_first(output, admitted)
                if admitted is not None:
                    output.num_cached_tokens = admitted.cached
                last = output
                if half is not None and output.finished:
                    end_first_half(half, output, adapter, self.hold_s)
                yield output
        finally:
            if self.admissions is not None:
                self.admissions.drop(tag)
            if last is not None and last.finished:
                self._note_finished(last)

    async def _fetch(self, prompt: Any, transfer: dict[str, Any], options: dict[str, Any]) -> Admitted | None:
        """Fetch the prompt's KV before a request of several choices, which then find it in the engine's blocks: every
        choice would fetch for itself, and the blocks are freed where they come from after the first."""
        params = one_token()
        tag = self._tag(params, transfer)
        kept = {name: options[name] for name in ("lora_request", "priority") if name in options}
        try:
            async for _ in super().generate(dict(prompt), params, f"fetch-{uuid.uuid4().hex}", **kept):
                return await self._admitted(tag)
        finally:
            if self.admissions is not None:
                self.admissions.drop(tag)
        return None

    def _tag(self, params: SamplingParams, transfer: dict[str, Any]) -> str:
        """Tell the KV connectors what the router knows of this request, and under which name to tell of it."""
        if self.admissions is None:
            set_transfer(params, transfer)
            return ""
        record, tag = current_request.get(), uuid.uuid4().hex
        plan = record.plan if record is not None else None
        hints = {"id": tag} | (msgspec.to_builtins(plan) if plan is not None else {})
        set_transfer(params, transfer | {"manta": hints})
        return tag

    async def _admitted(self, tag: str) -> Admitted | None:
        return await self.admissions.take(tag) if self.admissions is not None else None

    async def encode(
        self, prompt: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        set_salt(prompt)
        async for output in super().encode(prompt, *args, **kwargs):
            yield output

    def _note_first(self, output: RequestOutput, admitted: Admitted | None) -> None:
        prompt_tokens = len(output.prompt_token_ids or ())
        cached_tokens = admitted.cached if admitted is not None else output.num_cached_tokens or 0
        record = current_request.get()
        if record is not None:
            tiers = admitted.tiers if admitted is not None else None
            record.note_first_output(prompt_tokens, cached_tokens, tiers)
        stats = output.metrics
        if stats is not None and stats.scheduled_ts and stats.first_token_ts > stats.scheduled_ts:
            self.prefill_rate.note(prompt_tokens - cached_tokens, stats.first_token_ts - stats.scheduled_ts)

    def _note_finished(self, output: RequestOutput) -> None:
        stats = output.metrics
        if (
            stats is not None
            and stats.num_generation_tokens > 1
            and stats.last_token_ts > stats.first_token_ts
        ):
            self.decode_rate.note(stats.num_generation_tokens - 1, stats.last_token_ts - stats.first_token_ts)


def _prompt_tokens(prompt: Any) -> int:
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    return len(ids) if ids is not None else 0
