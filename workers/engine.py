"""The seam between a replica and what computes in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import ASGIApp

from cache_store.keys import EngineIdentity
from workers.handover import Handover
from workers.kv_events import KVEventSink
from workers.transfer import Transfer


class EngineUnhealthyError(RuntimeError):
    """The engine is dead or stuck; the replica must be replaced. The message says which and since when."""


@dataclass(frozen=True)
class EngineInfo:
    """Fixed once the engine has started."""

    identity: EngineIdentity
    block_tokens: int
    max_model_len: int
    models: tuple[str, ...]
    """Names that clients may ask for: the base model's, then LoRA adapters by their public names."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Public adapter name -> engine's name, `name@contenthash`."""
    transfer: Transfer | None = None
    """What it can do with other engines' KV; None for nothing."""
    no_transfer: str = ""
    """Why it can do nothing with it, where that was asked for."""


@dataclass(frozen=True)
class EngineLoad:
    """A moment in the engine. Rates are 0 until measured."""

    waiting: int = 0
    running: int = 0
    kv_used: float = 0.0
    prefill_rate: float = 0.0
    decode_rate: float = 0.0


class Engine(Protocol):
    """One engine of one replica. Call order: start, then anything, then shutdown.

    `app` is an OpenAI-compatible ASGI application. While it serves a request it finds the replica's
    `RequestRecord` in `current_request` (None when called without a replica around it): where that holds prompts,
    they replace the engine's own tokenising; the salt goes into the KV namespace; every sequence that is taken, and
    its first output, is noted there. A request whose client is gone is aborted within a second.

    Where the record has a `first_half`, the engine computes the prompt alone, keeps its blocks for another engine and
    notes the hand-over there, or why there is none. Where it has a `fetch`, the engine gets the prompt's KV from there,
    and computes what does not come. Both only for an engine whose `info.transfer` is not None.
    """

    app: ASGIApp
    info: EngineInfo

    async def start(self, sink: KVEventSink) -> None:
        """Load, and from then on give every KV event to `sink`. Sets `info` and `app`."""

    async def check_health(self) -> None:
        """Raises EngineUnhealthyError. Returns within `stuck_after_s` in any case."""

    def load(self) -> EngineLoad: ...

    async def release(self, handover: Handover) -> None:
        """Free the blocks of a hand-over within a second. Does nothing for one that is not kept any more."""

    async def shutdown(self) -> None:
        """Free everything. Safe to call twice, and after a failed start."""
