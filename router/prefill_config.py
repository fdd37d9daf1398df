"""The `router.prefill` section of a Manta configuration: when a prompt is computed by a replica of the prefill pool."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class PrefillConfig(BaseModel):
    """Prompts that one replica computes and another one answers. Live."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    when: Literal["faster", "always", "never"] = Field(
        "faster",
        description="`faster`: when it is predicted to take less of the cluster's time; `always`: whenever a replica "
        "of the prefill pool is there; `never`.",
    )
    min_tokens: int | None = Field(
        None,
        ge=1,
        description="In place of the prediction: prompts of which so many tokens are not at the replica that answers. "
        "By prediction where not given.",
    )
    on_no_prefill: Literal["local", "reject"] = Field(
        "local",
        description="What becomes of a prompt that should be computed by the prefill pool where none of its replicas "
        "is there: `local`: who answers computes it; `reject`: 503.",
    )
    save: bool = Field(
        True,
        description="The prefill pool saves the prompts that it computes to the store, and who answers does not.",
    )
    soft_roles: bool = Field(
        True,
        description="A role is a preference: a prefill replica also answers requests, as any other, when it is the "
        "best place. Otherwise only when there is no other.",
    )
    timeout_s: float = Field(
        120.0, gt=0, description="Longest wait for a prefill replica; then who answers computes the prompt."
    )
    stall_weight: float = Field(
        0.2,
        ge=0,
        description="Seconds until this request's first token that it is worth not to stop one running stream for a "
        "second.",
    )
