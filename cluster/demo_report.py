"""What the demo measured, for a person: a table of both runs side by side, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from string import ascii_uppercase
from typing import Self

from rich.table import Table
from rich.text import Text

from cluster.chat import ChatAnswer


@dataclass(frozen=True)
class Measured:
    """One request of one run."""

    chat: str
    turn: int
    """From 1."""
    replica: str
    cached: int
    computed: int
    """Prompt tokens found in the replica's cache, and those that it computed."""
    ttft_s: float

    @classmethod
    def of(cls, chat: str, turn: int, answer: ChatAnswer) -> Self:
        return cls(chat, turn, answer.replica, answer.cached, answer.computed, answer.ttft_s)


@dataclass
class Run:
    """The requests of one routing policy, in the order they were sent."""

    policy: str
    requests: list[Measured] = field(default_factory=list)

    @property
    def cached(self) -> int:
        return sum(request.cached for request in self.requests)

    @property
    def prompt(self) -> int:
        return self.cached + sum(request.computed for request in self.requests)

    @property
    def hit_ratio(self) -> float:
        """Prompt tokens found in a cache over all prompt tokens; 0 before the first request."""
        return self.cached / self.prompt if self.prompt else 0.0

    def median_ttft_s(self, repeated: bool) -> float:
        """Of requests with a prefix that was sent before (second turns and later), or of those without (first turns).

        Raises statistics.StatisticsError where there is none.
        """
        return median(request.ttft_s for request in self.requests if (request.turn > 1) == repeated)


def short_names(replicas: Iterable[str]) -> dict[str, str]:
    """Replica id -> A, B, ... in the order given; from the 27th on the id itself."""
    distinct = list(dict.fromkeys(replicas))
    return {replica: ascii_uppercase[i] if i < 26 else replica for i, replica in enumerate(distinct)}


def table(runs: Sequence[Run], chats: Sequence[Sequence[tuple[str, int]]], names: dict[str, str]) -> Table:
    """80 columns wide for two runs. Requests that were not sent yet are empty cells.

    `chats`: per run the (chat, turn) of every request in order.
    """
    grid = Table.grid(padding=(0, 3, 0, 0))
    cells = []
    for run, planned in zip(runs, chats, strict=True):
        part = Table(title=run.policy, title_style="bold", box=None, pad_edge=False, padding=(0, 1, 0, 0))
        part.add_column("chat turn", no_wrap=True)
        for heading in ("at", "cached", "computed", "TTFT"):
            part.add_column(heading, justify="right", no_wrap=True)
        before = 1
        for number, (chat, turn) in enumerate(planned):
            if turn != before:
                part.add_row()
            before = turn
            done = run.requests[number] if number < len(run.requests) else None
            part.add_row(f"{chat:<7} {turn}", *(_cells(done, names) if done else ("",) * 4))
        cells.append(part)
        grid.add_column()
    grid.add_row(*cells)
    return grid


def _cells(request: Measured, names: dict[str, str]) -> tuple[Text, ...]:
    style = "green" if request.cached > request.computed else ""
    replica = names.get(request.replica, request.replica)
    values = (replica, f"{request.cached}", f"{request.computed}", f"{request.ttft_s * 1000:.0f} ms")
    return tuple(Text(value, style=style) for value in values)


def closing_lines(affinity: Run, round_robin: Run) -> list[str]:
    """What the two complete runs come to, better or worse."""
    first, repeated = affinity.median_ttft_s(False), affinity.median_ttft_s(True)
    there = round_robin.median_ttft_s(True)
    return [
        f"TTFT (median): {_ms(first)} for a new prefix, {_ms(repeated)} for a repeated one "
        f"({_ms(there)} with round robin).",
        f"Hit ratio: {affinity.hit_ratio:.0%} with prefix affinity, {round_robin.hit_ratio:.0%} with round robin "
        f"({affinity.cached:,} of {affinity.prompt:,} prompt tokens were cached, against {round_robin.cached:,} of "
        f"{round_robin.prompt:,}).",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
