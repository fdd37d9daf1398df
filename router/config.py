"""The `router` section of a Manta configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PolicyConfig(Section):
    """How a replica is chosen. Live."""

    kind: Literal["affinity", "round_robin"] = Field(
        "affinity",
        description="`affinity` weighs a replica's prefix hits against its load; `round_robin` ignores both.",
    )
    load_weight_tokens: float = Field(
        512.0,
        ge=0,
        description="Prompt tokens that one running request counts as when replicas are compared.",
    )


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
    limits: LimitsConfig = LimitsConfig()
    tenants: dict[str, TenantConfig] = Field(
        default_factory=dict, description="With none, every caller is the one tenant and needs no key."
    )
    admin_key: str = Field("", description="Bearer key of /admin, or `env:NAME`; open where empty.")
    heartbeat_timeout_s: float = Field(
        5.0, gt=0, description="A replica that says nothing for so long gets no new requests."
    )
