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
from workers.vllm.prompt_adapter import set_salt


class ObservedLLM(AsyncLLM):
    """Notes the first output of every sequence in the request's record, and measures rates."""

    prefill_rate: RateMeter
    decode_rate: RateMeter
    prefill_backlog: int
    """Prompt tokens of requests that have no output yet."""
    admissions: Admissions | None
    """What the engine's KV connector tells; None without one."""

    def observe(self, admissions: Admissions | None = None) -> None:
        """Start measuring; called once, before the first request."""
        self.admissions = admissions
        self.prefill_rate = RateMeter()
        self.decode_rate = RateMeter()
        self.prefill_backlog = 0

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        set_salt(prompt)
        tag = self._tag(sampling_params)
        backlog = _prompt_tokens(prompt)
        self.prefill_backlog += backlog
        first = last = admitted = None
        try:
            async for output in super().generate(prompt, sampling_params, *args, **kwargs):
                if first is None:
                    first = output
                    self.prefill_backlog -= backlog
                    backlog = 0
                    admitted = await self._admitted(tag)
                    self._note_first(output, admitted)
                if admitted is not None:
                    output.num_cached_tokens = admitted.cached
                last = output
                yield output
        finally:
            self.prefill_backlog -= backlog
            if self.admissions is not None:
                self.admissions.drop(tag)
            if last is not None and last.finished:
                self._note_finished(last)

    def _tag(self, params: SamplingParams) -> str:
        """Tell the KV connector what the router knows of this request, and under which name to tell of it."""
        if self.admissions is None:
            return ""
        record, tag = current_request.get(), uuid.uuid4().hex
        plan = record.plan if record is not None else None
        hints = {"id": tag} | (msgspec.to_builtins(plan) if plan is not None else {})
        extra = params.extra_args or {}
        transfer = (extra.get("kv_transfer_params") or {}) | {"manta": hints}
        params.extra_args = extra | {"kv_transfer_params": transfer}
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
