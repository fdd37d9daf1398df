"""Whether one replica computes a prompt and another one answers, by predicted seconds.

```
whole      = ttft(answers) + stalled streams * prefill(answers) + decode(answers)
in halves  = max(queue, load)(computes) + prefill(computes) + stalled streams * prefill(computes)
             + transfer + last token(answers) + decode(answers)
```

**stalled**: streams that run at a replica stand still, or slow down, while a prompt is computed beside them, which
`router.prefill.stall_weight` weighs. Roles are preferences: there may be some at either. **transfer**: of what the
replica that answers does not have in its own blocks.
**decode**: a step there is longer by every stream that runs. Either side is taken at its best replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from router.candidates import Candidates, Floats, Ints
from router.choice import RouteRequest
from router.prediction import predict
from router.prefill_config import PrefillConfig

HANDOVER_S = 0.01
"""What a hand-over takes beside prefill and transfer: two more messages, and a step of the engine to begin with."""
LEAST_GAIN = 0.05
"""Part of the time in one piece that must be saved: a prediction is not so sure that less were worth the trouble."""
_OUTPUT_TOKENS = 128
_DECODE_WEIGHT = 0.1

Can = Callable[[str, str], bool]
"""Whether the second replica can fetch what the first one computes."""


class InHalves(NamedTuple):
    """Rows of the candidates, and what is expected."""

    prefill: int
    decode: int
    ship_tokens: int
    prefill_s: float
    """Until the prompt is computed, its queue included."""
    transfer_s: float
    ttft_s: float
    gain_s: float
    """Against the best replica that would do all of it; negative where that was not asked."""


class Verdict(NamedTuple):
    halves: InHalves | None
    reason: str
    """Why, as a label of a metric: `gain`, `always`, `min_tokens`; and for none of it `never`, `no_prefill`, `no_gain`,
    `short`."""


def split(
    request: RouteRequest, candidates: Candidates, whole: int, can: Can, config: PrefillConfig
) -> Verdict:
    """`whole` is the row that would answer alone, by the router's policy."""
    if config.when == "never":
        return Verdict(None, "never")
    halves = _best(request, candidates, whole, can, config)
    if halves is None:
        return Verdict(None, "no_prefill")
    if config.when == "always":
        return Verdict(halves, "always")
    if config.min_tokens is not None:
        enough = halves.ship_tokens >= config.min_tokens
        return Verdict(halves if enough else None, "min_tokens" if enough else "short")
    return Verdict(halves, "gain") if halves.gain_s > 0 else Verdict(None, "no_gain")


def _best(
    request: RouteRequest, candidates: Candidates, whole: int, can: Can, config: PrefillConfig
) -> InHalves | None:
    free = ~candidates.draining
    prefills = np.flatnonzero(free & candidates.prefill_role)
    decodes = np.flatnonzero(free & ~candidates.prefill_role)
    if not len(prefills) or not len(decodes):
        return None
    computing = predict(request, candidates, prefills)
    prompt = max(1, request.prompt_tokens)
    ship = prompt - np.minimum(candidates.matched[decodes], prompt - 1)
    transfer_s, last_s = _transfer_s(candidates, decodes, ship), _last_token_s(candidates, decodes, prompt)
    decode_s = _decode_s(request, candidates, decodes)
    order = np.argsort(transfer_s + last_s + decode_s, kind="stable")
    stalled_s = config.stall_weight * candidates.running[prefills] * computing.prefill_s
    for source in np.argsort(computing.ttft_s + stalled_s, kind="stable").tolist():
        name = candidates.ids[prefills[source]]
        target = next((at for at in order.tolist() if can(name, candidates.ids[decodes[at]])), None)
        if target is None:
            continue
        ttft_s = float(computing.ttft_s[source] + transfer_s[target] + last_s[target]) + HANDOVER_S
        alone_s = _whole_s(request, candidates, whole, config)
        return InHalves(
            int(prefills[source]),
            int(decodes[target]),
            int(ship[target]),
            float(computing.ttft_s[source]),
            float(transfer_s[target]),
            ttft_s,
            alone_s * (1 - LEAST_GAIN) - ttft_s - float(stalled_s[source] + decode_s[target]),
        )
    return None


def _whole_s(request: RouteRequest, candidates: Candidates, whole: int, config: PrefillConfig) -> float:
    row = np.array([whole])
    alone = predict(request, candidates, row)
    stalled_s = config.stall_weight * candidates.running[row] * alone.prefill_s
    return float((alone.ttft_s + stalled_s + _decode_s(request, candidates, row))[0])


def _transfer_s(candidates: Candidates, rows: Ints, tokens: Ints) -> Floats:
    speed = candidates.speed.take(rows)
    return speed.transfer_latency_s + tokens * speed.transfer_token_s


def _last_token_s(candidates: Candidates, rows: Ints, prompt: int) -> Floats:
    """The engine that answers computes the last token again, to sample from."""
    speed, running = candidates.speed.take(rows), candidates.running[rows]
    step_s = np.where(running > 0, speed.decode_step_s + speed.decode_stream_s * running, 0.0)
    return (
        speed.queue_s(candidates.pending[rows], candidates.waiting[rows])
        + step_s / 2
        + speed.prefill_s(1, prompt - 1)
    )


def _decode_s(request: RouteRequest, candidates: Candidates, rows: Ints) -> Floats:
    speed = candidates.speed.take(rows)
    output = min(_OUTPUT_TOKENS, request.expected_output_tokens or _OUTPUT_TOKENS)
    step_s = speed.decode_step_s + (2 * candidates.running[rows] + 1) * speed.decode_stream_s
    return _DECODE_WEIGHT * output * step_s
