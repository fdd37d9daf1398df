"""What a replica does for others than this router: the part of its load that the router's own ledger does not have."""

from __future__ import annotations

from typing import NamedTuple, Self

from cache_store.events import Load, Share


class OthersLoad(NamedTuple):
    """What is open at a replica that did not come through this router, as of its last report."""

    prefill_tokens: int = 0
    """Prompt tokens still to be computed."""
    prefilling: int = 0
    """Requests without a first token."""
    running: int = 0
    """Requests with one."""

    @classmethod
    def of(cls, load: Load, own: Share) -> Self:
        """Exact, whatever is on its way between router and replica: both figures are of the same moment there."""
        prefilling = load.prefilling - own.prefilling
        requests = load.http_requests - own.requests
        return cls(load.prefill_tokens - own.prefill_tokens, prefilling, requests - prefilling)


NO_OTHERS = OthersLoad()
