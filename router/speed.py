"""What replicas were measured to do, in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

TIERS = 4
"""Tiers that a node loads from, in the order of `router.loadable.Loadable`: dram, peer, disk, remote."""
_SCALARS = (
    "prefill_overhead_s",
    "prefill_token_s",
    "prefill_pair_s",
    "decode_step_s",
    "decode_stream_s",
    "transfer_token_s",
    "transfer_latency_s",
)
_LOAD_TOKEN = slice(len(_SCALARS), len(_SCALARS) + TIERS)
_LOAD_LATENCY = slice(len(_SCALARS) + TIERS, len(_SCALARS) + 2 * TIERS)
FIELDS = len(_SCALARS) + 2 * TIERS
UNDER_WAY = 0.5
"""Part of the first prompt's fixed cost that is over, on average."""


@dataclass(frozen=True, slots=True, eq=False)
class Speed:
    """One replica's speed, or a column per figure for many: the same arithmetic does for both.

    Prefill of t tokens behind c cached ones takes overhead + t * token + t * (c + t / 2) * pair seconds: attention
    looks back at every token before. A decode step takes step + stream * (running streams) seconds.
    """

    table: Floats
    """(FIELDS,) for one replica, (FIELDS, n) for n of them; read it through the properties."""

    @classmethod
    def of(
        cls,
        *,
        prefill_overhead_s: float = 0.0,
        prefill_token_s: float = 0.0,
        prefill_pair_s: float = 0.0,
        decode_step_s: float = 0.0,
        decode_stream_s: float = 0.0,
        transfer_token_s: float = 0.0,
        transfer_latency_s: float = 0.0,
        load_token_s: Iterable[float] = (0.0,) * TIERS,
        load_latency_s: Iterable[float] = (0.0,) * TIERS,
    ) -> Self:
        """One replica's."""
        scalars = (
            prefill_overhead_s, prefill_token_s, prefill_pair_s, decode_step_s, decode_stream_s,
            transfer_token_s, transfer_latency_s,
        )  # fmt: skip
        return cls(np.array([*scalars, *load_token_s, *load_latency_s], dtype=np.float64))

    @classmethod
    def stack(cls, speeds: Iterable[Speed]) -> Self:
        """Columns, from the speeds of single replicas."""
        tables = [speed.table for speed in speeds]
        return cls(np.stack(tables, axis=1) if tables else np.zeros((FIELDS, 0)))

    def row(self, index: int) -> Speed:
        """One replica's, out of columns."""
        return Speed(self.table[:, index].copy())

    def take(self, rows: NDArray[Any] | slice) -> Speed:
        """Columns of some rows, by numbers or by mask; a slice shares the memory."""
        return Speed(self.table[:, rows])

    def _column(self, number: int) -> Floats:
        column: Floats = self.table[number]
        return column

    @property
    def prefill_overhead_s(self) -> Floats:
        return self._column(0)

    @property
    def prefill_token_s(self) -> Floats:
        return self._column(1)

    @property
    def prefill_pair_s(self) -> Floats:
        return self._column(2)

    @property
    def decode_step_s(self) -> Floats:
        return self._column(3)

    @property
    def decode_stream_s(self) -> Floats:
        return self._column(4)

    @property
    def transfer_token_s(self) -> Floats:
        """From a prefill replica to a decode replica."""
        return self._column(5)

    @property
    def transfer_latency_s(self) -> Floats:
        return self._column(6)

    @property
    def load_token_s(self) -> Floats:
        """(4,) or (n, 4), by tier."""
        return self.table[_LOAD_TOKEN].T

    @property
    def load_latency_s(self) -> Floats:
        """(4,) or (n, 4), by tier: what a load takes however short it is."""
        return self.table[_LOAD_LATENCY].T

    def prefill_s(self, tokens: Any, cached: Any) -> Floats:
        """Seconds to compute `tokens` behind `cached` ones on a replica that does nothing else."""
        pairs = tokens * (cached + tokens / 2)
        seconds: Floats = (
            self.prefill_overhead_s + tokens * self.prefill_token_s + pairs * self.prefill_pair_s
        )
        return seconds

    def queue_s(self, tokens: Any, requests: Any) -> Floats:
        """Seconds to compute the prompts of `requests` that have `tokens` in all to compute.

        How the tokens are shared out is not known: all prompts count as equally long, and as not cached. Nor is how far
        the first prompt has come: it counts with a half of what every prompt costs.
        """
        requests = np.maximum(requests, np.asarray(tokens) > 0)
        longest = tokens / np.maximum(requests, 1)
        seconds: Floats = (
            np.maximum(requests - UNDER_WAY, 0.0) * self.prefill_overhead_s
            + tokens * self.prefill_token_s
            + tokens * longest / 2 * self.prefill_pair_s
        )
        return seconds

    def named(self) -> dict[str, Any]:
        """One replica's figures by name, as JSON has them. Inverse of `from_named`."""
        figures: dict[str, Any] = dict(zip(_SCALARS, self.table[: len(_SCALARS)].tolist(), strict=True))
        return figures | {
            "load_token_s": self.load_token_s.tolist(),
            "load_latency_s": self.load_latency_s.tolist(),
        }

    @classmethod
    def from_named(cls, figures: Mapping[str, Any]) -> Self:
        """Raises TypeError for a name that is none of a speed's, ValueError for what are no numbers."""
        return cls.of(**figures)


PRIOR = Speed.of(
    prefill_overhead_s=0.01,
    prefill_token_s=1 / 10_000,
    prefill_pair_s=0.0,
    decode_step_s=0.01,
    decode_stream_s=0.0002,
    transfer_token_s=1 / 100_000,
    transfer_latency_s=0.005,
    load_token_s=(1 / 100_000, 1 / 30_000, 1 / 20_000, 1 / 5_000),
    load_latency_s=(0.002, 0.010, 0.010, 0.050),
)
"""A replica that nothing is known of. Latencies are those of `cache_store.load_cost`."""
