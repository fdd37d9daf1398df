"""The KV connector of a Manta whose chunk keys are of the next format, for the engine's processes that import it."""

from __future__ import annotations

from functools import partial

from cache_store.keys import FORMAT_VERSION, EngineIdentity
from workers.vllm import identity
from workers.vllm.connector.connector import MantaConnector

__all__ = ["MantaConnector", "NextIdentity"]

NextIdentity = partial(EngineIdentity, format_version=FORMAT_VERSION + 1)
identity.EngineIdentity = NextIdentity  # type: ignore[assignment, misc]
