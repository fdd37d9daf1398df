"""What a replica knows of one request while it serves it.

The replica's HTTP layer makes a record and puts it in a context variable; the engine behind the OpenAI application
finds it there, without either knowing the other.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """One HTTP request. A request with several prompts or choices adds them up."""

    request_id: str
    prompts: list[list[int]] | None = None
    """Token ids of each prompt, from the router; None when the router could not render the request."""
    salt: str = ""
    """Cache salt that the router derived for the tenant; empty for none."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_output: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with the first token of the first sequence; the answer's head waits for it."""

    def note_first_output(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Called once per sequence, with its first output."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.first_output.set()

    @property
    def cached_header(self) -> str:
        """Tokens by where their KV came from."""
        return f"hbm={self.cached_tokens},computed={self.prompt_tokens - self.cached_tokens}"


current_request: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)
