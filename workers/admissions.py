"""What an engine's KV connector tells of requests: where the KV of their prompts was when they first ran."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

from cache_store.wire import TIER_NAMES

_CAPACITY = 8192
_TURNS = 16


class Admitted(NamedTuple):
    """One prompt. Tokens that are in none of these were computed."""

    tiers: dict[str, int]
    """`hbm` for the engine's own blocks, then the store's tiers, then `nixl` for another engine's where it has any."""

    @property
    def cached(self) -> int:
        return sum(self.tiers.values())


class Admissions:
    """Of requests whose first output has not been seen yet, by the tag that they were given. Belongs to one loop."""

    def __init__(self) -> None:
        self._known: dict[str, Admitted] = {}

    def note(self, counts: Mapping[str, Any]) -> None:
        """`counts` are those of `workers.vllm.connector.counts`. The first of a tag's sequences counts: the others
        share its prompt."""
        for tag, requests in counts.get("admissions", {}).items():
            local, loaded, elsewhere = next(iter(requests.values()))
            tiers = {"hbm": local} | {name: loaded[code] for code, name in enumerate(TIER_NAMES) if code}
            if elsewhere:
                tiers["nixl"] = elsewhere
            self._known.setdefault(tag, Admitted(tiers))
            if len(self._known) > _CAPACITY:
                del self._known[next(iter(self._known))]

    async def take(self, tag: str) -> Admitted | None:
        """None where nothing was told: of an engine without a connector, or with its statistics off.

        The news comes in the same message as the first output at the latest, and is noted after it.
        """
        for _ in range(_TURNS):
            if tag in self._known:
                break
            await asyncio.sleep(0)
        return self._known.pop(tag, None)

    def drop(self, tag: str) -> None:
        self._known.pop(tag, None)
