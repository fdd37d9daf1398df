"""Where the request costs the cluster the fewest seconds.

```
cost = ttft + behind + streams + decode + room
```

`ttft` is `router.prediction`'s. The others are what the choice costs everybody else:

- **behind**: whoever comes next waits for this prompt too. Its prefill counts once more for every request that waits at
  the average candidate: the busier the cluster, the more a prefix hit is worth next to an idle replica.
- **streams**: running streams stand still while a prompt is computed beside them.
- **decode**: a further stream makes every decode step longer, for itself and for those that run there. Where all have
  the prefix, this is what shares them out.
- **room**: a replica whose KV blocks are nearly all taken must preempt somebody, who is computed again.

Fails when: what it predicts is wrong, as after a change of the replicas' speed, until some requests have shown it
(`router.calibration`); prompts can't be tokenised, when it guesses their length and finds no prefix; load reports come
late and many routers see the same idle replica, since a router's own reservations only spread its own burst. A prefix
that all share is computed anew on every replica sooner or later; with little KV, that pushes out what others had.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from router.candidates import Candidates, Floats
from router.choice import Choice, RouteRequest
from router.policies.picking import choice_of
from router.prediction import Predicted, predict

MOST_BEHIND = 10.0
"""Waiting requests per candidate beyond which a queue says nothing more about those that are still to come."""
NEAR = 0.1
"""Part of the first token's time by which costs may differ and count as equal. Speeds are not known any better, and a
replica that was once found a little slower would never be asked again while others idle."""
NEAR_S = 0.005
"""The same in seconds, for prefills that take next to nothing."""
FULL_FROM = 0.9
"""Part of the KV blocks in use from which a new request may push another out."""


@dataclass(frozen=True, slots=True)
class PredictedTtftPolicy:
    """Weights are seconds until this request's first token that one second of others is worth."""

    behind_weight: float = 1.0
    streams_weight: float = 0.05
    decode_weight: float = 0.1
    room_weight: float = 1.0
    output_tokens: int = 128
    """Expected of a request that does not say."""

    def choose(self, request: RouteRequest, candidates: Candidates) -> Choice | None:
        usable = candidates.usable()
        if not len(usable):
            return None
        compared = candidates if len(usable) == len(candidates) else candidates.take(usable)
        predicted = predict(request, compared)
        others_s = self._others_s(request, compared, predicted)
        cost = predicted.ttft_s + others_s
        near = max(NEAR * float(predicted.ttft_s[cost.argmin()]), NEAR_S)
        return choice_of(request, candidates, usable, cost, predicted, others_s, near)

    def _others_s(self, request: RouteRequest, compared: Candidates, predicted: Predicted) -> Floats:
        speed, running = compared.speed, compared.running
        behind = min(float(compared.waiting.mean()), MOST_BEHIND)
        held_up = self.behind_weight * behind + self.streams_weight * running
        step_s = speed.decode_step_s + (2 * running + 1) * speed.decode_stream_s
        output = self.output_tokens
        if request.expected_output_tokens is not None:
            output = min(output, request.expected_output_tokens)
        others_s: Floats = held_up * predicted.prefill_s + self.decode_weight * output * (
            step_s - step_s.min()
        )
        full = compared.kv_used > FULL_FROM
        if full.any():
            part = np.where(full, (compared.kv_used - FULL_FROM) / (1 - FULL_FROM), 0.0)
            others_s += self.room_weight * part * speed.prefill_s(request.prompt_tokens, 0)
        return others_s
