"""How long the simulated engine takes for its work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from workers.config import SimConfig


@dataclass(frozen=True)
class LatencyModel:
    """Prefill is linear in the tokens to compute; a decode step grows with the streams that share it."""

    prefill_tokens_per_s: float
    prefill_overhead_s: float
    decode_tokens_per_s: float
    decode_slowdown: float

    @classmethod
    def of(cls, config: SimConfig) -> Self:
        return cls(
            config.prefill_tokens_per_s,
            config.prefill_overhead_s,
            config.decode_tokens_per_s,
            config.decode_slowdown,
        )

    def prefill_s(self, tokens: int) -> float:
        """Seconds of one prefill of `tokens` prompt tokens that are not cached."""
        return self.prefill_overhead_s + tokens / self.prefill_tokens_per_s

    def decode_step_s(self, streams: int) -> float:
        """Seconds until each of `streams` running streams has its next token."""
        return (1 + self.decode_slowdown * (streams - 1)) / self.decode_tokens_per_s
