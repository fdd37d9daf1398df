"""The `cache` section of a Manta configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class CacheConfig(BaseModel):
    """How KV is cut into the units that the cluster knows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunk_tokens: int = Field(
        256,
        ge=1,
        description="Tokens per chunk; a whole number of engine blocks. Only full chunks are shared.",
    )
