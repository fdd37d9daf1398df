"""What is known of a request once it is over, and of a run."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

Outcome = Literal["ok", "error", "interrupted"]


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds from the start of the measured run, those of tokens seconds from `sent_s`."""

    session: str
    turn: int
    due_s: float
    """When the arrival process or the session's turn wanted it sent."""
    sent_s: float
    end_s: float
    """When its answer, or what came instead, was complete."""
    outcome: Outcome
    token_s: tuple[float, ...] = ()
    """Arrival of each chunk that carries a choice; a chunk may hold several tokens, and in a chat the first one is
    the role. This is what vLLM's benchmark times."""
    input_tokens: int = 0
    """As the endpoint counted them; as planned where it did not."""
    output_tokens: int = 0
    """As the endpoint counted them; the number of chunks where it did not."""
    cached_tokens: int | None = None
    """From `usage.prompt_tokens_details`; None where the endpoint does not say."""
    tiers: dict[str, int] = {}
    """From `x-manta-cached`: input tokens by where they came from."""
    replica: str | None = None
    prefill: str | None = None
    status: int | None = None
    """HTTP status of the last attempt; None where no answer began."""
    retries: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """To the first chunk with a choice. Only of a request that is ok."""
        return self.token_s[0]

    @property
    def latency_s(self) -> float:
        """To the last chunk with a choice. Only of a request that is ok."""
        return self.token_s[-1]

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)]


class RunOutcome(NamedTuple):
    records: list[RequestRecord]
    """In the order in which they ended."""
    elapsed_s: float
    """From the start until the last answer, or the interruption."""
    interrupted: bool
