"""One request in two halves: a prefill replica computes the prompt, and another one fetches its KV and answers."""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass

from router.disaggregation import InHalves
from router.exchange import Exchange
from router.first_half import ClientsOwn, Ends, Kept, NotKept, first_half
from router.ledger import Reservation
from router.metrics import RouterMetrics
from workers.messages import FETCH_HEADER, HANDOVER_HEADER, Plan, ReplicaInfo, pack_handover

logger = logging.getLogger(__name__)

_NOTHING_KEPT = frozenset({"connect", "refused", "failed"})
"""Ways in which a first half ends where the replica surely keeps nothing."""

_WARN_EVERY_S = 60.0
_warned: dict[str, float] = {}
"""By reason, when it was logged last."""


@dataclass(frozen=True)
class PrefillPlace:
    """Where the prompt is computed, with a place reserved there until it is."""

    replica: ReplicaInfo
    reservation: Reservation
    expected: InHalves
    reason: str
    """Why it is computed there: `router.disaggregation.Verdict`'s."""
    plan: Plan | None = None


class Half:
    """The first half of one request, from the decision to the end of the second. Call order: `compute`, then
    `answered` with what came of the second half; `close` at any point, and at the end."""

    def __init__(self, place: PrefillPlace, ends: Ends, metrics: RouterMetrics) -> None:
        self.name = uuid.uuid4().hex
        self.place = place
        self.kept: Kept | None = None
        self.failure: NotKept | None = None
        self._ends = ends
        self._metrics = metrics
        self._may_keep = False

    @property
    def header(self) -> tuple[str, str]:
        """Of the request to the prefill replica."""
        return HANDOVER_HEADER, self.name

    async def compute(self, exchange: Exchange) -> bool:
        """Have the prompt computed. False where the request is one that no replica takes; `exchange` has what to tell
        the client. Raises ClientGone."""
        self._may_keep = True
        began = time.monotonic()
        outcome = await first_half(exchange)
        self.place.reservation.release()
        if isinstance(outcome, ClientsOwn):
            self._may_keep = False
            return False
        if isinstance(outcome, Kept):
            self.kept = outcome
            self._metrics.prefilled(self.place.expected.prefill_s, outcome.since - began)
            return True
        self.failure = outcome
        self._may_keep = outcome.reason not in _NOTHING_KEPT
        if time.monotonic() - _warned.get(outcome.reason, float("-inf")) > _WARN_EVERY_S:
            _warned[outcome.reason] = time.monotonic()
            logger.warning(
                "replica %s did not compute a prompt for another (%s): %s; further ones are counted, for a minute",
                self.place.replica.id,
                outcome.reason,
                outcome.error or "see its log",
            )
        return True

    def for_second(self, body: bytes) -> tuple[bytes, dict[str, str]]:
        """The body for the replica that answers, and the headers that go with it."""
        if self.kept is None:
            return body, {}
        packed = pack_handover(self.kept.for_fetching(time.monotonic()))
        return body + packed, {FETCH_HEADER: str(len(packed))}

    def answered(self, nixl_tokens: int) -> str:
        """The replica that answers has its first token, and so many of the prompt's tokens came from the other. Returns
        what to tell the client."""
        if nixl_tokens:
            self._metrics.in_halves(self.place.reason, nixl_tokens)
            return self.place.replica.id
        # A prompt that was there already needs nothing fetched; that is rare, and counts as what it was planned as.
        reason = self.failure.reason if self.failure is not None else "not_fetched"
        self._metrics.fell_back(reason)
        return f"fallback={reason}"

    def close(self) -> None:
        """Safe to call twice. The blocks are free within a second of this, where nobody has fetched them."""
        self.place.reservation.release()
        if self._may_keep:
            self._may_keep = False
            self._ends.end(self.place.replica.address, self.name)
