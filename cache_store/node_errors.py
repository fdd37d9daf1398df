"""Why a node can't have a cache."""

from __future__ import annotations


class CacheSetupError(RuntimeError):
    """A node can't have the cache that its configuration asks for. The message says what was found and needed."""
