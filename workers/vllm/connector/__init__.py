"""The engine's end of the shared KV cache: a vLLM KV connector that saves and loads whole chunks.

vLLM is given the module `workers.vllm.connector` and the class `MantaConnector`. One half of it lives in the
scheduler, which decides; another in every worker, which moves the bytes. What they know and how they choose is
plain Python (`requests`, `scheduler_half`, `worker_half`, `mover`); `connector` is the shell that vLLM calls.
"""

from __future__ import annotations

from typing import Any

__all__ = ["MantaConnector"]


def __getattr__(name: str) -> Any:
    """Imports vLLM only for whoever asks for the connector itself."""
    if name == "MantaConnector":
        from workers.vllm.connector.connector import MantaConnector

        return MantaConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
