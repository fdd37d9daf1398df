"""What became of every request, in columns: a million of them fit into memory."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

Outcome = Literal["answered", "broken", "refused"]
OUTCOMES: tuple[Outcome, ...] = ("answered", "broken", "refused")
"""`broken`: its replica died after its first token. `refused`: larger than a replica, or none is left to serve it."""
SOURCES = ("hbm", "dram", "peer", "disk", "remote")


class Records:
    """A row for each request that has ended, in the order of their ends."""

    def __init__(self) -> None:
        self.number, self.replica, self.attempts = array("l"), array("l"), array("l")
        self.outcome = bytearray()
        self.arrived_s, self.decided_s, self.first_s, self.ended_s = (array("d") for _ in range(4))
        """`first_s` is when the first token came; -1 where none did."""
        self.prompt_tokens, self.output_tokens, self.computed = array("l"), array("l"), array("l")
        self.cached = {source: array("l") for source in SOURCES}
        """Prompt tokens by where their KV was."""
        self.compute_s, self.predicted_s = array("d"), array("d")
        """`predicted_s` is what the policy said of the time from its decision to the first token; -1 where nothing."""

    def __len__(self) -> int:
        return len(self.number)

    def add(
        self,
        number: int,
        outcome: Outcome,
        times: tuple[float, float, float, float],
        tokens: tuple[int, int],
        *,
        replica: int = -1,
        attempts: int = 1,
        cached: Sequence[int] = (0,) * len(SOURCES),
        computed: int = 0,
        compute_s: float = 0.0,
        predicted_s: float = -1.0,
    ) -> None:
        """`times`: arrived, decided, first token, ended; `tokens`: of prompt and output; `cached` as in SOURCES."""
        self.number.append(number)
        self.outcome.append(OUTCOMES.index(outcome))
        arrived, decided, first, ended = times
        self.arrived_s.append(arrived)
        self.decided_s.append(decided)
        self.first_s.append(first)
        self.ended_s.append(ended)
        self.prompt_tokens.append(tokens[0])
        self.output_tokens.append(tokens[1])
        self.replica.append(replica)
        self.attempts.append(attempts)
        for source, count in zip(SOURCES, cached, strict=True):
            self.cached[source].append(count)
        self.computed.append(computed)
        self.compute_s.append(compute_s)
        self.predicted_s.append(predicted_s)
