"""How long each candidate would take for a request, in seconds: columns in, columns out.

```
ttft = max(queue, load) + prefill
```

**queue**: the prompts before this one at the replica's prefill speed, less the time since they were counted, and half
of the decode step that is under way. **load**: the part of the prompt that is worth loading, tier by tier. It runs
beside the queue, so only what outlasts that is waited for. **prefill**: the rest, as a function of its length and of
what stands before it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from router.candidates import Candidates, Floats, Ints
from router.choice import Prediction, RouteRequest


class Predicted(NamedTuple):
    """Columns over the rows that were asked for; seconds, if not said otherwise."""

    queue_s: Floats
    load_s: Floats
    prefill_s: Floats
    ttft_s: Floats
    load_tokens: Ints
    """Tokens that it is best to load."""

    def row(self, index: int, others_s: float = 0.0) -> Prediction:
        return Prediction(
            float(self.queue_s[index]),
            float(self.load_s[index]),
            float(self.prefill_s[index]),
            others_s,
            float(self.ttft_s[index]),
        )


def predict(request: RouteRequest, candidates: Candidates, rows: Ints | slice = slice(None)) -> Predicted:
    """`rows` of the candidates, by number; all of them where not given."""
    speed = candidates.speed.take(rows)
    running = candidates.running[rows]
    step_s = np.where(running > 0, speed.decode_step_s + speed.decode_stream_s * running, 0.0)
    queue_s = speed.queue_s(candidates.pending[rows], candidates.waiting[rows])
    if candidates.waited_s is not None:
        queue_s = np.maximum(queue_s - candidates.waited_s[rows], 0.0)
    queue_s = queue_s + step_s / 2
    prompt = max(1, request.prompt_tokens)
    # An engine computes at least the last token of a prompt, to have something to sample from.
    matched = np.minimum(candidates.matched[rows], prompt - 1)
    loadable = candidates.loadable[rows]
    if loadable.any():
        load_tokens, load_s = _best_split(candidates, rows, prompt, matched, loadable)
    else:
        load_tokens, load_s = np.zeros_like(matched), np.zeros(len(matched))
    held = matched + load_tokens
    prefill_s = speed.prefill_s(prompt - held, held)
    return Predicted(queue_s, load_s, prefill_s, np.maximum(queue_s, load_s) + prefill_s, load_tokens)


def _best_split(
    candidates: Candidates, rows: Ints | slice, prompt: int, matched: Ints, loadable: Ints
) -> tuple[Ints, Floats]:
    """How many tokens to load, and how long that takes.

    Tiers are loaded from the fastest on, and a tier either whole or not at all: within one, each further token is worth
    at least as much as the one before it, since later tokens are dearer to compute. Where chunks of a slow tier stand
    before those of a fast one the engine does better than this; it decides again, by what it finds.
    """
    speed = candidates.speed.take(rows)
    upto = np.minimum(np.cumsum(loadable, axis=1), (prompt - 1 - matched)[:, None])
    taken = np.diff(upto, axis=1, prepend=0)
    seconds = taken * speed.load_token_s + (taken > 0) * speed.load_latency_s
    load_s = np.zeros((len(matched), loadable.shape[1] + 1))
    np.cumsum(seconds, axis=1, out=load_s[:, 1:])
    load_tokens = np.zeros(load_s.shape, dtype=np.int64)
    load_tokens[:, 1:] = upto
    held = matched[:, None] + load_tokens
    tokens = prompt - held
    total = (
        load_s
        + tokens * speed.prefill_token_s[:, None]
        + tokens * (held + tokens / 2) * speed.prefill_pair_s[:, None]
    )
    best = total.argmin(axis=1)
    every = np.arange(len(best))
    return load_tokens[every, best], load_s[every, best]
