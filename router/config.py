"""The `router` section of a Manta configuration."""

from __future__ import annotations

import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from router.prefill_config import PrefillConfig


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


POLICIES = ("predicted_ttft", "prefix_affinity", "least_loaded", "round_robin", "session")
_CLASS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class WeightsConfig(Section):
    """What policies weigh by. Live."""

    behind: float = Field(
        1.0,
        ge=0,
        description="`predicted_ttft`: a second that requests behind this one wait for its prefill.",
    )
    streams: float = Field(
        0.05, ge=0, description="`predicted_ttft`: a second that a running stream stands still for a prefill."
    )
    decode: float = Field(
        0.1, ge=0, description="`predicted_ttft`: a second that answers take longer, this one's or another's."
    )
    room: float = Field(
        1.0, ge=0, description="`predicted_ttft`: a second of computing again where the KV blocks run out."
    )
    output_tokens: int = Field(
        128, ge=1, description="Output tokens that a request counts with, unless it allows fewer."
    )
    request_tokens: float = Field(
        512.0,
        ge=0,
        description="`prefix_affinity` and `least_loaded`: prompt tokens that one open request counts as.",
    )


class PolicyConfig(Section):
    """How a replica is chosen. Live."""

    kind: str = Field(
        "prefix_affinity",
        description="`prefix_affinity` weighs a replica's prefix hits against its load, `predicted_ttft` predicted "
        "seconds; `least_loaded`, `round_robin` and `session` look at less; or your own, as `package.module:Class`.",
    )
    weights: WeightsConfig = WeightsConfig()
    options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the class that `kind` names; none for the others."
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.kind not in POLICIES and not _CLASS.fullmatch(self.kind):
            raise ValueError(
                f"kind is {self.kind!r}; needed: one of {', '.join(POLICIES)}, or package.module:Class"
            )
        if self.options and self.kind in POLICIES:
            raise ValueError(
                f"options has {', '.join(sorted(self.options))}; needed: none, since {self.kind} goes by `weights`"
            )
        return self

    @property
    def wants_session(self) -> bool:
        """Whether the policy may ask which session a request belongs to."""
        return self.kind not in ("predicted_ttft", "prefix_affinity", "least_loaded", "round_robin")


class LimitsConfig(Section):
    """Bounds on what a router takes in. Live."""

    max_body_bytes: int = Field(64 * 1024 * 1024, ge=1024, description="A larger request gets 413.")
    max_requests_per_replica: int = Field(256, ge=1, description="Open requests at one replica; more wait.")
    max_queue: int = Field(1024, ge=0, description="Requests that wait for a replica; more get 429.")
    queue_timeout_s: float = Field(60.0, gt=0, description="Longest wait for a replica; then 503 or 429.")
    connect_timeout_s: float = Field(5.0, gt=0, description="Longest wait for a connection to a replica.")
    first_token_timeout_s: float = Field(600.0, gt=0, description="Longest wait for a replica's first token.")
    answer_timeout_s: float = Field(
        3600.0, gt=0, description="Longest wait for an answer that is not streamed."
    )
    idle_timeout_s: float = Field(300.0, gt=0, description="Longest pause inside an answer.")
    max_attempts: int = Field(3, ge=1, description="Replicas that are tried before the first token.")
    max_buffered_bytes: int = Field(
        256 * 1024, ge=4096, description="Unread bytes of one stream before the replica's socket is paused."
    )


class TenantConfig(Section):
    """Who a set of API keys belongs to. Tenants never share KV. Live."""

    api_keys: tuple[str, ...] = Field((), description="Keys, or `env:NAME` for the value of a variable.")


class RouterConfig(Section):
    """The ingress."""

    replicas: int = Field(1, ge=1, description="Routers. Each decides alone.")
    num_cpus: float = Field(0.0, ge=0, description="CPUs asked of Ray by one router.")
    policy: PolicyConfig = PolicyConfig()
    prefill: PrefillConfig = PrefillConfig()
    limits: LimitsConfig = LimitsConfig()
    tenants: dict[str, TenantConfig] = Field(
        default_factory=dict, description="With none, every caller is the one tenant and needs no key."
    )
    admin_key: str = Field("", description="Bearer key of /admin, or `env:NAME`; open where empty.")
    heartbeat_timeout_s: float = Field(
        5.0, gt=0, description="A replica that says nothing for so long gets no new requests."
    )
