"""Which replicas can hand the KV of a prompt to which: looked at when a replica appears, not at its first request."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from workers.messages import KVLayout, ReplicaInfo, Transfer, why_not

logger = logging.getLogger(__name__)

_Kind = tuple[str, KVLayout]


class Pairing:
    """Of the replicas that there are. Replicas of equal layout are looked at once."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._reasons: dict[tuple[_Kind, _Kind], str] = {}

    def update(self, replicas: Iterable[ReplicaInfo]) -> None:
        """These are all that there are. A pair of pools that can't be one is logged, once."""
        infos = list(replicas)
        self._kinds = {
            info.id: (info.transfer.kind, info.transfer.layout) for info in infos if info.transfer is not None
        }
        known = set(self._kinds.values())
        self._reasons = {pair: why for pair, why in self._reasons.items() if known.issuperset(pair)}
        sources = {info.id: info for info in infos if info.role == "prefill"}
        for source in sources:
            for target in self._kinds.keys() - sources.keys():
                self._look(source, target)

    def can(self, source: str, target: str) -> bool:
        """Whether replica `target` can fetch what `source` computes. A replica does not fetch from itself."""
        return (
            source != target
            and source in self._kinds
            and target in self._kinds
            and not self._look(source, target)
        )

    @property
    def refusals(self) -> list[str]:
        """Why pairs of layouts don't fit, for people."""
        return sorted({why for why in self._reasons.values() if why})

    def _look(self, source: str, target: str) -> str:
        if source not in self._kinds or target not in self._kinds:
            return ""
        pair = self._kinds[source], self._kinds[target]
        reason = self._reasons.get(pair)
        if reason is None:
            reason = self._reasons[pair] = why_not(*(Transfer(kind, "", layout) for kind, layout in pair))  # type: ignore[arg-type]
            if reason:
                logger.error(
                    "replica %s can't fetch KV that %s computes, and computes its prompts itself: %s",
                    target,
                    source,
                    reason,
                )
        return reason
