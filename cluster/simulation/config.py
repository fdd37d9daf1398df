"""What is simulated: engines, tiers, pools, router, failures and load, validated as a whole before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cluster.simulation.sizes import parse_size
from router.config import PolicyConfig

MAX_REPLICAS = 10_000
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]


class SimulationConfigError(ValueError):
    """A simulation that can't be run as asked. The message has one line per finding."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EngineTimes(Section):
    """One engine's speed and room. The defaults are an 8B model on one data centre GPU."""

    prefill_overhead_s: float = Field(0.005, ge=0, description="Of a prefill, however short.")
    prefill_token_s: float = Field(4e-5, gt=0, description="Of one prompt token that is computed.")
    prefill_pair_s: float = Field(1.3e-9, ge=0, description="Of one token's attention to one before it.")
    decode_step_s: float = Field(0.007, gt=0, description="Of a decode step, with any number of streams.")
    decode_stream_s: float = Field(0.0002, ge=0, description="What each running stream adds to a step.")
    max_running: int = Field(64, ge=1, description="Streams that run at once; the rest wait.")
    step_tokens: int = Field(
        8192, ge=1, description="Prompt tokens in one step at most; decoding streams take part in every step."
    )
    kv_bytes_per_token: Size = Field(131_072, gt=0, description="KV of one token, all layers and ranks.")
    gpus: int = Field(1, ge=1, description="GPUs of one replica, for GPU-seconds.")


class Bandwidth(Section):
    """What loading from a tier takes: a latency, and a rate that a node's loads from that tier share."""

    latency_s: float = Field(ge=0)
    bytes_per_s: Size = Field(gt=0)


class TiersConfig(Section):
    """Where chunks are kept beside the engines' own blocks, and how fast they come from there."""

    dram: Size = Field(0, description="Of each node, for KV; 0 for none.")
    disk: Size = Field(0, description="Of each node, for KV; 0 for none.")
    remote: Size = Field(0, description="Of all nodes together; 0 for none.")
    dram_eviction: Literal["lru", "s3fifo", "cost"] = Field("cost", description="As `cache.dram.eviction`.")
    disk_eviction: Literal["lru", "s3fifo", "cost"] = Field("lru", description="Of disk and remote.")
    disk_admission: Literal["always", "second_touch"] = "second_touch"
    remote_admission: Literal["always", "second_touch"] = "second_touch"
    from_dram: Bandwidth = Bandwidth(latency_s=0.002, bytes_per_s=20_000_000_000)
    from_peer: Bandwidth = Bandwidth(latency_s=0.01, bytes_per_s=8_000_000_000)
    from_disk: Bandwidth = Bandwidth(latency_s=0.01, bytes_per_s=5_000_000_000)
    from_remote: Bandwidth = Bandwidth(latency_s=0.05, bytes_per_s=1_000_000_000)

    @property
    def any(self) -> bool:
        return bool(self.dram or self.disk or self.remote)


class PrefillPool(Section):
    """Replicas that only compute prompts; the others then decode."""

    replicas: int = Field(ge=1, le=MAX_REPLICAS)
    transfer: Bandwidth = Field(
        Bandwidth(latency_s=0.005, bytes_per_s=20_000_000_000),
        description="From a prefill replica to a decode replica.",
    )


class Failure(Section):
    """A replica that dies and may come back."""

    replica: int = Field(ge=0, description="Its number, from 0; those of the prefill pool come last.")
    at_s: float = Field(ge=0)
    back_s: float | None = Field(None, ge=0, description="When it serves again, empty; never if not given.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.back_s is not None and self.back_s <= self.at_s:
            raise ValueError(f"back_s is {self.back_s:g}; needed: later than at_s = {self.at_s:g}")
        return self


class Autoscaling(Section):
    """How many replicas there are, by the requests that are open."""

    min_replicas: int = Field(1, ge=1, le=MAX_REPLICAS)
    max_replicas: int = Field(ge=1, le=MAX_REPLICAS)
    target_requests: float = Field(8.0, gt=0, description="Open requests per replica that is aimed at.")
    start_s: float = Field(60.0, ge=0, description="From the decision until a new replica serves.")
    interval_s: float = Field(10.0, gt=0, description="Between two looks at the demand.")
    downscale_delay_s: float = Field(300.0, ge=0, description="Demand must be low for so long.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas}; needed: at most max_replicas = {self.max_replicas}"
            )
        return self


class SharedPrefixLoad(Section):
    """Groups of users; the users of a group share a prefix, and each asks with something of his own behind it."""

    kind: Literal["shared-prefix"] = "shared-prefix"
    groups: int = Field(150, ge=1)
    users: int = Field(5, ge=1)
    prefix_tokens: int = Field(6000, ge=0)
    suffix_tokens: int = Field(1200, ge=1)
    output_tokens: int = Field(1000, ge=1)
    rate: float = Field(20.0, gt=0, description="Requests per second, Poisson.")
    requests: int = Field(3000, ge=1)


class AgenticLoad(Section):
    """Sessions whose every turn carries all before it; a turn follows when the last one's answer is there."""

    kind: Literal["agentic"] = "agentic"
    sessions: int = Field(75, ge=1)
    turns: int = Field(30, ge=1)
    common_tokens: int = Field(20_000, ge=0, description="At the start of every session.")
    first_tokens: int = Field(10_000, ge=1, description="What a session begins with, its own.")
    turn_tokens: int = Field(2048, ge=1, description="What a further turn adds.")
    output_tokens: int = Field(900, ge=1)
    think_s: float = Field(5.0, ge=0, description="Mean pause before a further turn.")
    ramp_s: float = Field(60.0, ge=0, description="Sessions begin evenly over so long.")


Load = Annotated[SharedPrefixLoad | AgenticLoad, Field(discriminator="kind")]


class SimulationConfig(Section):
    """One run of one policy."""

    replicas: int = Field(
        8, ge=1, le=MAX_REPLICAS, description="That answer; with a prefill pool they decode."
    )
    replicas_per_node: int = Field(8, ge=1, description="They share a node's dram, disk and bandwidth.")
    blocks: int = Field(1000, ge=1, description="Chunks that fit into one replica's KV memory.")
    chunk_tokens: int = Field(512, ge=1, description="Of the trace's blocks: 512 in Mooncake's form.")
    engine: EngineTimes = EngineTimes()
    measured: Path | None = Field(
        None,
        description="Measurements of an engine and tiers (JSON lines) that replace the times given here.",
    )
    tiers: TiersConfig = TiersConfig()
    prefill_pool: PrefillPool | None = None
    policy: PolicyConfig = PolicyConfig()
    news_delay_s: float = Field(
        0.05, ge=0, description="Until the router knows what a replica or store holds."
    )
    failures: tuple[Failure, ...] = ()
    autoscaling: Autoscaling | None = None
    load: Load | None = Field(None, description="A made load; or give a trace.")
    time_scale: float = Field(1.0, gt=0, description="2 plays a trace at half, 0.5 at double speed.")
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _replicas_exist(self) -> Self:
        for number, failure in enumerate(self.failures):
            if failure.replica >= self.all_replicas:
                raise ValueError(
                    f"failures.{number}.replica is {failure.replica}; needed: below {self.all_replicas}, the replicas "
                    f"there are"
                )
        if self.autoscaling is not None:
            if self.prefill_pool is not None:
                raise ValueError("autoscaling: needed: no prefill_pool beside it")
            least, most = self.autoscaling.min_replicas, self.autoscaling.max_replicas
            if not least <= self.replicas <= most:
                raise ValueError(
                    f"replicas is {self.replicas}; needed: from autoscaling.min_replicas = {least} to max_replicas = "
                    f"{most}"
                )
        return self

    @property
    def all_replicas(self) -> int:
        """The most there may ever be, the prefill pool included."""
        most = self.replicas if self.autoscaling is None else self.autoscaling.max_replicas
        return most + (self.prefill_pool.replicas if self.prefill_pool is not None else 0)

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.engine.kv_bytes_per_token


def simulation_config(fields: dict[str, Any], source: str = "") -> SimulationConfig:
    """Raises SimulationConfigError with a line per finding: where, what was found, what is needed."""
    try:
        return SimulationConfig.model_validate(fields)
    except ValidationError as error:
        raise SimulationConfigError("\n".join(_finding(each, source) for each in error.errors())) from error


def load_fields(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, not yet validated. Raises SimulationConfigError."""
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SimulationConfigError(f"{path}: can't be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise SimulationConfigError(f"{where}: {getattr(error, 'problem', None) or error}") from error
    if not isinstance(fields, dict | None):
        raise SimulationConfigError(f"{path}:1: found {type(fields).__name__}; needed: a mapping of settings")
    return fields or {}


def _finding(error: Any, source: str) -> str:
    field = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    found = error.get("input")
    if error["type"] == "extra_forbidden":
        message = "no such setting"
    elif isinstance(found, str | int | float) and "found" not in message:
        message = f"found {found!r}; {message[0].lower()}{message[1:]}"
    return ": ".join(part for part in (source, field, message) if part)
