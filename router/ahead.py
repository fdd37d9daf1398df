"""What stood before a request at its replica when it was decided, kept until its first token shows what that meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

from router.calibration import Observation
from router.candidates import Candidates
from router.choice import Choice, Prediction


class Ahead(NamedTuple):
    pending: int
    waiting: int
    running: int
    waited_s: float
    kv_used: float
    predicted: Prediction | None

    @classmethod
    def of(cls, candidates: Candidates, choice: Choice) -> Self:
        at = choice.index
        return cls(
            int(candidates.pending[at]),
            int(candidates.waiting[at]),
            int(candidates.running[at]),
            float(candidates.waited_s[at]) if candidates.waited_s is not None else 0.0,
            float(candidates.kv_used[at]),
            choice.predicted,
        )

    def observation(self, seconds: float, tokens: Mapping[str, int]) -> Observation:
        """`seconds` from the decision to the first token. `tokens` of the prompt by tier, and those computed, as the
        replica counted them."""
        loaded = (
            tokens.get("dram", 0), tokens.get("peer", 0), tokens.get("disk", 0), tokens.get("remote", 0)
        )  # fmt: skip
        computed = tokens.get("computed", 0)
        cached = sum(tokens.values()) - computed
        before = self.pending, self.waiting, self.running, self.waited_s, self.kv_used
        return Observation(seconds, computed, cached, loaded, *before)
