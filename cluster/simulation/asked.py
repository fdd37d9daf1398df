"""A request on its way through the cluster, from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache_store.events import ChunkKey
from cluster.simulation.engine import Job
from cluster.simulation.records import Outcome, Records
from cluster.simulation.router_view import Decided
from cluster.simulation.workload import Request
from router.loadable import Loadable


@dataclass(slots=True, eq=False)
class Asked:
    """A request that has not ended."""

    number: int
    request: Request
    keys: list[ChunkKey]
    answer: list[ChunkKey]
    decided: Decided | None = None
    decided_s: float = 0.0
    first_s: float = -1.0
    attempts: int = 0
    job: Job | None = None
    """Where its prompt is computed."""
    predicted_s: float = -1.0
    ready_s: float = 0.0
    """When what was fetched ahead for it is there."""
    sources: list[int] = field(default_factory=lambda: [0] * len(Loadable._fields))
    """Chunks that came, as in `Loadable`."""

    def came_from(self, chunks: Loadable) -> None:
        for source, count in enumerate(chunks):
            self.sources[source] += count

    def start_again(self) -> None:
        """Its replica has died before the first token; what was loaded is lost with it."""
        self.ready_s, self.sources = 0.0, [0] * len(Loadable._fields)

    def loaded_tokens(self, chunk_tokens: int) -> tuple[int, int, int, int]:
        """By source, as in `Loadable`. What came and was not used is left out, the slowest first."""
        used = self.job.fetched // chunk_tokens if self.job is not None else 0
        dram, peer, disk, remote = Loadable(*self.sources).within(used)
        return dram * chunk_tokens, peer * chunk_tokens, disk * chunk_tokens, remote * chunk_tokens

    def record(self, records: Records, outcome: Outcome, now: float, chunk_tokens: int) -> None:
        """It has ended."""
        asked, job, decided = self.request, self.job, self.decided
        tokens = asked.prompt_tokens, asked.output_tokens
        if outcome == "refused" or job is None or decided is None:
            records.add(self.number, outcome, (asked.at_s, now, -1.0, now), tokens)
            return
        records.add(
            self.number,
            outcome,
            (asked.at_s, self.decided_s, self.first_s, now),
            tokens,
            replica=decided.row,
            attempts=self.attempts,
            cached=(job.cached, *self.loaded_tokens(chunk_tokens)),
            computed=job.computed,
            compute_s=job.compute_s,
            predicted_s=self.predicted_s,
        )
