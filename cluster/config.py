"""`ClusterConfig`: the one object that a Manta deployment is made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cache_store.config import CacheConfig
from router.config import RouterConfig
from workers.config import EngineConfig, ModelConfig, PoolConfig
from workers.transfer import TransferConfig


class ConfigError(ValueError):
    """A configuration that can't be used. The message has one line per finding: field, value found, value needed."""


class HttpConfig(BaseModel):
    """Where clients reach the cluster."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="Address to listen at; `0.0.0.0` lets other machines in.")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen at.")
    route_prefix: str = Field(
        "/",
        pattern=r"^/(?:[a-z0-9][a-z0-9._~-]*(?:/[a-z0-9][a-z0-9._~-]*)*)?$",
        description="Where under that port this cluster is, as in `/law` for clients of `http://host:8000/law/v1`. "
        "Clusters on one Ray share address and port, and each needs a prefix of its own.",
    )
    proxy_location: Literal["EveryNode", "HeadOnly"] = Field(
        "EveryNode",
        description="Where Serve listens: on nodes with routers or replicas, and beside its controller on the head; or "
        "there alone.",
    )


class RayConfig(BaseModel):
    """The Ray cluster that `manta up` starts when it is given no address."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    port: int = Field(6399, ge=1, le=65535, description="Port of the control service (GCS).")
    num_cpus: int | None = Field(
        None, ge=0, description="CPUs that Ray counts; the machine's where not given."
    )
    object_store_mib: int = Field(256, ge=80, description="Size of Ray's object store, in /dev/shm.")
    dashboard_port: int | None = Field(None, ge=1, le=65535, description="No dashboard where not given.")


class PlacementConfig(BaseModel):
    """On which nodes of a Ray cluster of several hosts routers and replicas run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    use_roles: bool = Field(
        False,
        description="Routers run only on nodes with the Ray resource `manta_router`, replicas only on those with "
        "`manta_unified`, `manta_prefill` or `manta_decode`, as their role is; "
        "`ray start --resources='{\"manta_decode\": 1}'` makes such a node, and `manta up` one that has them all.",
    )
    nodes_timeout_s: float | None = Field(
        60.0,
        ge=0,
        description="Longest wait, when it is deployed, for nodes with those resources; then it is an error that says "
        "which there are none of. Not looked for where not given, as on a Ray that starts nodes on demand.",
    )
    max_replicas_per_node: int | None = Field(
        None,
        ge=1,
        description="Replicas of one pool on one node, of those that need no more than one; no limit where not given.",
    )
    max_routers_per_node: int | None = Field(
        None, ge=1, description="Routers on one node; no limit where not given."
    )


class ClusterConfig(BaseModel):
    """One YAML file, one object. Every package defines its own section."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("manta", pattern=r"^[a-z][a-z0-9-]{0,62}$", description="Serve application name.")
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    pools: tuple[PoolConfig, ...] = (PoolConfig(),)
    router: RouterConfig = RouterConfig()
    cache: CacheConfig = CacheConfig()
    transfer: TransferConfig = TransferConfig()
    http: HttpConfig = HttpConfig()
    placement: PlacementConfig = PlacementConfig()
    ray: RayConfig = RayConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.engine.kind == "vllm" and not self.model.path:
            raise ValueError(
                "model.path is empty: the vllm engine needs a model folder, hub id or fetched model"
            )
        roles = [pool.role for pool in self.pools]
        if len(set(roles)) != len(roles):
            raise ValueError(f"pools: roles {roles} repeat; give each role one pool")
        if not set(roles) & {"unified", "decode"}:
            raise ValueError(f"pools: roles {roles} can't answer requests; add a unified or decode pool")
        block = self.block_tokens
        if block and self.cache.chunk_tokens % block:
            raise ValueError(
                f"cache.chunk_tokens is {self.cache.chunk_tokens}; needed: a multiple of the engine's block "
                f"of {block} tokens"
            )
        return self

    @property
    def transfers(self) -> TransferConfig | None:
        """For replicas that compute prompts for each other; None where none does."""
        wanted = any(pool.role == "prefill" for pool in self.pools) or self.transfer.kind == "nixl"
        return self.transfer if wanted and self.transfer.kind != "off" else None

    def engine_of(self, pool: PoolConfig) -> EngineConfig:
        """The engine of that pool's replicas, with its own arguments."""
        return self.engine.model_copy(update={"args": {**self.engine.args, **pool.args}})

    @property
    def served_name(self) -> str:
        """Name that clients ask for."""
        return self.model.served_name or "sim"

    @property
    def endpoint(self) -> str:
        """Where clients reach the cluster from this machine."""
        return self.endpoint_at("127.0.0.1")

    def endpoint_at(self, node: str) -> str:
        """Where clients reach the cluster at a node of that address, if Serve listens there at all."""
        host = node if self.http.host in ("", "0.0.0.0", "::") else self.http.host
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.http.port}{self.http.route_prefix.rstrip('/')}"

    @property
    def block_tokens(self) -> int | None:
        """Tokens per engine block where the configuration says it; the engine decides where it does not."""
        if self.engine.kind == "sim":
            return self.engine.sim.block_tokens
        given = self.engine.args.get("block-size", self.engine.args.get("block_size"))
        return int(given) if given is not None else None

    @classmethod
    def parse(cls, data: Any, source: str = "configuration") -> Self:
        """Raises ConfigError with one line per finding."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(source, item) for item in error.errors())) from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a YAML file. Raises ConfigError when it can't be read, parsed or used."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: can't be read ({error.strerror})") from error
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: not valid YAML: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: found {type(data).__name__}, needed a mapping of sections")
        return cls.parse(data, str(path))


def _explain(source: str, item: Any) -> str:
    field = ".".join(str(part) for part in item["loc"])
    found = item.get("input")
    if item["type"] == "extra_forbidden":
        return f"{source}: {field}: no such field (found {found!r})"
    if not field:
        return f"{source}: {item['msg'].removeprefix('Value error, ')}"
    return f"{source}: {field}: found {found!r}; needed: {item['msg'].removeprefix('Value error, ')}"
