"""What a replica knows of one request while it serves it.

The replica's HTTP layer makes a record and puts it in a context variable; the engine behind the OpenAI application
finds it there, without either knowing the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from workers.handover import Fetch, FirstHalf
from workers.messages import Plan
from workers.open_requests import OpenRequest


@dataclass
class RequestRecord:
    """One HTTP request. A request with several prompts or choices adds them up."""

    request_id: str
    prompts: list[list[int]] | None = None
    """Token ids of each prompt, from the router; None when the router could not render the request."""
    salt: str = ""
    """Cache salt that the router derived for the tenant; empty for none."""
    plan: Plan | None = None
    """The router's; None for none."""
    first_half: FirstHalf | None = None
    """The prompt is computed for another replica, and nothing is answered; None for a request that is answered here."""
    fetch: Fetch | None = None
    """Where the prompt's KV may be fetched; None for nowhere."""
    opened: OpenRequest | None = None
    """Its place in the replica's account; None without a replica around the engine."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of `prompt_tokens`, those whose KV was not computed for this request."""
    tiers: dict[str, int] = field(default_factory=dict)
    """`cached_tokens` by where they were, as far as the engine tells."""
    first_output: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with the first token of the first sequence; the answer's head waits for it."""

    def begin_prefill(self, tokens: int, measured: bool) -> None:
        """Called once per sequence, when the engine takes it; see `OpenRequest.begin_prefill`."""
        if self.opened is not None:
            self.opened.begin_prefill(tokens, measured)

    def note_first_output(
        self, prompt_tokens: int, cached_tokens: int, tiers: Mapping[str, int] | None = None
    ) -> None:
        """Called once per sequence, with its first output. `tiers` add up to `cached_tokens`; None for all `hbm`."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        for tier, tokens in (tiers if tiers is not None else {"hbm": cached_tokens}).items():
            self.tiers[tier] = self.tiers.get(tier, 0) + tokens
        if self.opened is not None:
            self.opened.end_prefill(prompt_tokens - cached_tokens)
        self.first_output.set()

    @property
    def cached_header(self) -> str:
        """Tokens by where their KV came from: `hbm=512,dram=1024,...,computed=98`."""
        tokens = self.tiers | {"computed": self.prompt_tokens - self.cached_tokens}
        return ",".join(f"{tier}={count}" for tier, count in tokens.items())


current_request: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)
