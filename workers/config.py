"""The `model`, `engine` and `pools` sections of a Manta configuration."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from workers.messages import Role


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Section):
    """What is served."""

    path: str = Field(
        "",
        description="Folder with a Hugging Face model, a hub id, or the name of a model of `manta model fetch`.",
    )
    name: str = Field("", description="Name that clients ask for; the last part of `path` where empty.")
    adapters: dict[str, str] = Field(
        default_factory=dict, description="LoRA adapters: public name -> folder in PEFT's layout."
    )

    @property
    def served_name(self) -> str:
        return self.name or self.path.rstrip("/").rsplit("/", 1)[-1]


class SimConfig(Section):
    """The latency model and the block cache of a simulated engine."""

    virtual_replicas: int = Field(1, ge=1, le=512, description="Replicas that one Serve replica hosts.")
    prefill_tokens_per_s: float = Field(20_000.0, gt=0, description="Speed of a prefill.")
    prefill_overhead_s: float = Field(0.002, ge=0, description="Fixed cost of one prefill.")
    decode_tokens_per_s: float = Field(100.0, gt=0, description="Speed of one stream alone.")
    decode_slowdown: float = Field(
        0.02, ge=0, description="Each further running stream makes a decode step longer by this part."
    )
    transfer_tokens_per_s: float = Field(
        500_000.0, gt=0, description="Speed at which KV comes from another engine."
    )
    block_tokens: int = Field(32, ge=1, description="Tokens per KV block.")
    blocks: int = Field(4096, ge=1, description="KV blocks of one replica.")
    max_running: int = Field(64, ge=1, description="Streams that run at once; the rest wait.")
    max_model_len: int = Field(131_072, ge=1, description="Tokens of prompt and answer together at most.")


_REFUSED_ARGS = {
    "api-key": "a router would be refused too; give keys to router.tenants",
    "api-server-count": "a replica has one server; use pools.replicas",
    "config": "a second file could set what this one may not; give its arguments here",
    "data-parallel-size": "every rank has KV of its own that a router could not tell apart; use pools.replicas",
    "headless": "a replica needs its own server",
    "kv-events-config": "the replica sets it to learn what the engine holds",
    "lora-modules": "model.adapters gives them, named by their content",
}
"""vLLM's arguments that can't work inside a replica, and why."""


def _check_args(args: dict[str, Any]) -> None:
    for name, value in args.items():
        reason = _REFUSED_ARGS.get(name.replace("_", "-"))
        off = value in (None, False) or (name.replace("_", "-").endswith(("-size", "-count")) and value == 1)
        if reason is not None and not off:
            raise ValueError(f"args.{name} is {value!r}; needed: nothing, since {reason}")


class EngineConfig(Section):
    """Which engine, and what it is started with."""

    kind: Literal["vllm", "sim"] = Field("vllm", description="A real engine, or a simulated one.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Where vLLM computes; `auto` is cuda when the Ray cluster has GPUs at deploy time.",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's own arguments by their long names (`max-model-len: 4096`), passed as they are.",
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment of the engine's processes.")
    sim: SimConfig = SimConfig()
    stuck_after_s: float = Field(
        120.0, gt=0, description="An engine core that answers nothing for so long is replaced."
    )

    @model_validator(mode="after")
    def _fits_a_replica(self) -> Self:
        _check_args(self.args)
        return self


class AutoscalingConfig(Section):
    """Replica count by demand: requests at the replicas plus requests that wait in routers."""

    min_replicas: int = Field(1, ge=0, description="With 0 the first request waits for a replica to start.")
    max_replicas: int = Field(2, ge=1, description="Never more than these.")
    target_requests: float = Field(8.0, gt=0, description="Requests per replica that the count aims at.")
    upscale_delay_s: float = Field(10.0, ge=0, description="Demand must be high for so long.")
    downscale_delay_s: float = Field(300.0, ge=0, description="Demand must be low for so long.")
    look_back_s: float = Field(10.0, gt=0, description="Demand is averaged over so long.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}, more than max_replicas = {self.max_replicas}"
            )
        return self


class ResourcesConfig(Section):
    """What one replica takes."""

    cores: int = Field(1, ge=0, description="CPU cores of its own; on a CPU engine it is pinned to them.")
    num_cpus: float = Field(0.0, ge=0, description="CPUs asked of Ray.")
    gpus: int | None = Field(
        None,
        ge=0,
        description="GPUs; tensor x pipeline parallel size on a GPU engine where not given, else 0.",
    )
    gpus_per_node: int = Field(
        8, ge=1, description="A replica with more GPUs than this spans nodes, with vLLM's ray executor."
    )
    custom: dict[str, float] = Field(default_factory=dict, description="Further Ray resources.")


class PoolConfig(Section):
    """Replicas of one role: one Serve deployment."""

    role: Role = Field(
        "unified", description="What the pool is preferred for, and the name of its Serve deployment."
    )
    replicas: int = Field(
        1, ge=0, description="Serve replicas; with `autoscaling`, how many there are at first."
    )
    autoscaling: AutoscalingConfig | None = Field(
        None, description="A fixed number of replicas where not given."
    )
    resources: ResourcesConfig = ResourcesConfig()
    args: dict[str, Any] = Field(
        default_factory=dict, description="Of vLLM's arguments, what this pool has other than `engine.args`."
    )
    drain_timeout_s: float = Field(
        600.0, ge=0, description="Longest wait for open requests before a replica stops."
    )

    @model_validator(mode="after")
    def _fits_a_replica(self) -> Self:
        _check_args(self.args)
        return self
