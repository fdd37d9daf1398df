"""What vLLM is asked for where one engine computes a prompt and another one answers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams

from workers.handover import Fetch, FirstHalf, Handover, prompt_digest
from workers.vllm.nixl import FETCH_UNTIL

TRANSFER = "kv_transfer_params"
KEEP = {"do_remote_decode": True}
"""vLLM's word for: keep the blocks for another engine."""
_REACH_LIMIT_S = 1.0
_PLAIN = frozenset({"type", "prompt", "prompt_token_ids", "cache_salt", "arrival_time"})
"""What an engine's input has where its prompt is tokens and nothing else."""


class HalfRefusedError(ValueError):
    """This prompt can't be computed for another engine."""


def begin_first_half(half: FirstHalf, prompt: Any, params: SamplingParams) -> SamplingParams:
    """Parameters for the prompt's prefill alone, whatever the client wants generated: what is sampled here is thrown
    away, and the second half samples for itself. Raises HalfRefusedError, with the reason also in `half`."""
    reason = "it has several prompts" if half.done or half.started else _why_not(prompt, params)
    if reason:
        half.refusal = half.refusal or reason
        raise HalfRefusedError(f"hand-over {half.name}: {reason}")
    half.started = True
    return one_token()


def one_token() -> SamplingParams:
    return SamplingParams(
        max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def end_first_half(half: FirstHalf, output: Any, adapter: str, hold_s: float) -> None:
    """`output` is the request's last."""
    params = output.kv_transfer_params or {}
    if not params.get("remote_block_ids") or not any(params["remote_block_ids"]):
        half.refusal = "the engine kept nothing"
        return
    tokens = output.prompt_token_ids
    half.handover = Handover(
        name=half.name,
        engine=params["remote_engine_id"],
        request=params["remote_request_id"],
        tokens=len(tokens),
        digest=prompt_digest(adapter, tokens),
        hold_s=hold_s,
        params=params,
    )


def begin_second_half(fetch: Fetch, prompt: Any, params: SamplingParams, adapter: str) -> dict[str, Any]:
    """vLLM's transfer parameters for the request; empty where the KV can't be used, with the reason in `fetch`."""
    handover = fetch.handover
    fetch.skipped = fetch.skipped or _why_not(prompt, params)
    if not fetch.skipped and handover.digest != prompt_digest(adapter, prompt["prompt_token_ids"]):
        fetch.skipped = "it is of another prompt"
    if not fetch.skipped and time.monotonic() >= fetch.until:
        fetch.skipped = "it came too late"
    return {} if fetch.skipped else handover.params | {FETCH_UNTIL: fetch.until}


async def check_source(fetch: Fetch) -> None:
    """Note in `fetch` where nobody listens any more at the place that the KV was said to be. vLLM would wait for five
    seconds at an engine that it has not met."""
    params = fetch.handover.params
    try:
        connecting = asyncio.open_connection(params["remote_host"], params["remote_port"])
        _, writer = await asyncio.wait_for(connecting, _REACH_LIMIT_S)
    except (OSError, TimeoutError, KeyError):
        fetch.skipped = "the engine that kept it is not there"
    else:
        writer.close()


def set_transfer(params: SamplingParams, transfer: dict[str, Any]) -> None:
    """In place of what a client may have put there: it moves KV between engines past tenants and accounts."""
    extra = {name: value for name, value in (params.extra_args or {}).items() if name != TRANSFER}
    if transfer:
        extra[TRANSFER] = transfer
    params.extra_args = extra or None


def adapter_of(lora_request: Any) -> str:
    return "" if lora_request is None else str(lora_request.lora_name)


def _why_not(prompt: Any, params: SamplingParams) -> str:
    if not isinstance(prompt, dict) or not prompt.keys() <= _PLAIN or not prompt.get("prompt_token_ids"):
        return "the prompt is more than tokens"
    if params.prompt_logprobs is not None:
        return "the answer needs the prompt's own probabilities"
    return ""
