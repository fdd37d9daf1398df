"""What a benchmark run is asked to do, validated as a whole before anything is sent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

MAX_REQUESTS = 1_000_000
MAX_CONCURRENCY = 20_000
MAX_DURATION_S = 7 * 24 * 3600.0

GoodputMetric = Literal["ttft", "tpot", "itl", "e2el"]


class BenchConfigError(ValueError):
    """A benchmark that can't be run as asked. The message has one line per finding."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MultiTurn(Section):
    """Conversations whose every turn carries the whole history."""

    kind: Literal["multi-turn"] = "multi-turn"
    conversations: int = Field(16, ge=1, le=MAX_REQUESTS)
    turns: int = Field(4, ge=1, le=10_000)
    system_tokens: int = Field(0, ge=0, description="A system prompt that all conversations share.")
    input_tokens: int = Field(128, ge=1, description="Tokens that the user adds in each turn.")
    output_tokens: int = Field(64, ge=1)
    think_s: float = Field(0.0, ge=0, le=3600, description="Mean pause before a further turn.")


class SharedPrefix(Section):
    """Groups of users; the users of a group share a prefix."""

    kind: Literal["shared-prefix"] = "shared-prefix"
    groups: int = Field(8, ge=1, le=MAX_REQUESTS)
    users: int = Field(8, ge=1, le=MAX_REQUESTS, description="Users per group.")
    prefix_tokens: int = Field(1024, ge=1)
    suffix_tokens: int = Field(64, ge=1)
    output_tokens: int = Field(64, ge=1)


class TraceReplay(Section):
    """A recorded trace in Mooncake's form."""

    kind: Literal["trace"] = "trace"
    path: Path
    limit: int | None = Field(None, ge=1, description="Only so many requests from the start.")
    time_scale: float = Field(1.0, gt=0, description="2 replays at half, 0.5 at double speed.")
    length_scale: float = Field(
        1.0, gt=0, le=1, description="Input, output and blocks become so much shorter."
    )
    max_input_tokens: int | None = Field(None, ge=1, description="Longer prompts are cut, after scaling.")


class RandomLengths(Section):
    """Prompts that share nothing."""

    kind: Literal["random"] = "random"
    input_tokens: int = Field(512, ge=1)
    output_tokens: int = Field(64, ge=1)
    range_ratio: float = Field(
        0.0, ge=0, lt=1, description="Lengths are uniform in [1 - r, 1 + r] times these."
    )


Workload = Annotated[MultiTurn | SharedPrefix | TraceReplay | RandomLengths, Field(discriminator="kind")]


class Arrival(Section):
    """When requests are sent."""

    kind: Literal["closed", "poisson", "trace"] = "closed"
    concurrency: int | None = Field(
        None,
        ge=1,
        le=MAX_CONCURRENCY,
        description="Closed: sessions at a time. Else: bound on requests in flight.",
    )
    rate: float | None = Field(None, gt=0, description="Requests per second; inf sends all at once.")
    burstiness: float = Field(
        1.0,
        gt=0,
        description="Shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts, inf is an even beat.",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "poisson" and self.rate is None:
            raise ValueError("poisson arrivals need a rate in requests per second")
        if self.kind != "poisson" and self.rate is not None:
            raise ValueError(f"a rate belongs to poisson arrivals, found {self.kind}")
        return self


class Target(Section):
    """The endpoint, and how it is asked."""

    url: str = "http://127.0.0.1:8000"
    model: str = Field("", description="The endpoint's first model where empty.")
    endpoint: Literal["chat", "completions"] = "chat"
    prompt_form: Literal["text", "ids"] = "text"
    vocabulary: int = Field(
        32_000, ge=256, description="Token ids are drawn from the upper three quarters of so many."
    )
    headers: dict[str, str] = Field(default_factory=dict)
    temperature: float | None = Field(None, ge=0)
    ignore_eos: bool = Field(True, description="Answers have exactly the length asked for (vLLM, SGLang).")
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Further fields of every request.")
    timeout_s: float = Field(600.0, gt=0, description="Limit on one request.")
    retry_429: bool = Field(
        False, description="Wait as Retry-After says and ask again; TTFT includes the wait."
    )

    @field_validator("url")
    @classmethod
    def _base(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"found {url!r}; needed: http://HOST:PORT or https://HOST")
        return url.rstrip("/").removesuffix("/v1")

    @model_validator(mode="after")
    def _ids_need_completions(self) -> Self:
        if self.prompt_form == "ids" and self.endpoint == "chat":
            raise ValueError("chat takes no token ids; use the completions endpoint or the text form")
        return self


class BenchConfig(Section):
    """One run."""

    label: str = ""
    seed: int = 0
    target: Target = Target()
    workload: Workload = RandomLengths()
    arrival: Arrival = Arrival()
    num_requests: int | None = Field(
        None,
        ge=1,
        le=MAX_REQUESTS,
        description="The workload's own size where neither this nor a duration is given.",
    )
    duration_s: float | None = Field(
        None, gt=0, le=MAX_DURATION_S, description="Nothing is sent after so long; what is in flight ends."
    )
    warmup: int = Field(0, ge=0, le=10_000, description="Requests sent before, unmeasured.")
    goodput: dict[GoodputMetric, float] = Field(
        default_factory=dict, description="Metric to its limit in ms."
    )

    @model_validator(mode="after")
    def _times_in_the_trace(self) -> Self:
        if self.arrival.kind == "trace" and self.workload.kind != "trace":
            raise ValueError(f"arrivals by trace need a trace, found the workload {self.workload.kind}")
        return self


def bench_config(fields: dict[str, Any]) -> BenchConfig:
    """Raises BenchConfigError."""
    try:
        return BenchConfig.model_validate(fields)
    except ValidationError as error:
        raise BenchConfigError("\n".join(_finding(each) for each in error.errors())) from error


def parse_goodput(limits: list[str]) -> dict[str, float]:
    """`["ttft:500", "itl:50"]` as a map, in milliseconds. Raises BenchConfigError."""
    parsed: dict[str, float] = {}
    for limit in limits:
        name, _, value = limit.partition(":")
        try:
            parsed[name] = float(value)
        except ValueError:
            raise BenchConfigError(
                f"goodput: found {limit!r}; needed: METRIC:MILLISECONDS, as in ttft:500"
            ) from None
    return parsed


def _finding(error: Any) -> str:
    field = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message
