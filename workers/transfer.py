"""Which replicas can hand the KV of a prompt to which, and what says so: pure, for replicas and routers alike."""

from __future__ import annotations

from typing import Literal, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from cache_store.keys import EngineIdentity


class TransferConfig(BaseModel):
    """How KV gets from the replica that computes a prompt to the one that answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["auto", "nixl", "off"] = Field(
        "auto",
        description="`auto`: by NIXL in a cluster with a `prefill` pool, and without where it can't start, which is "
        "said once; `nixl`: in any cluster, and not without; `off`: not at all.",
    )
    backends: tuple[str, ...] = Field(
        ("UCX",), min_length=1, description="NIXL's backends; variables for UCX go into `engine.env`."
    )
    buffer: Literal["device", "cpu"] = Field(
        "device",
        description="`device`: straight out of and into the engines' KV; `cpu`: by way of host memory, where NIXL "
        "can't register the device's.",
    )
    hold_s: int = Field(
        30,
        ge=6,
        description="KV that nobody fetches or gives up is freed after so long; fetching begins three seconds before "
        "that or not at all.",
    )


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What has to fit between two engines for one to read the other's blocks."""

    model: str
    """`EngineIdentity.model`."""
    engine: str
    """Name and version of the engine; its protocol differs between versions."""
    kv_dtype: str
    layers: int
    kv_heads: int
    """Of the whole model."""
    head_size: int
    block_tokens: int
    layout: str
    platform: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    latent: bool = False
    """The KV is not split by heads: every rank holds all of it (MLA)."""

    @classmethod
    def of(cls, identity: EngineIdentity, engine: str, latent: bool = False) -> Self:
        return cls(
            model=identity.model,
            engine=engine,
            kv_dtype=identity.kv_dtype,
            layers=identity.layers,
            kv_heads=identity.kv_heads,
            head_size=identity.head_size,
            block_tokens=identity.block_tokens,
            layout=identity.layout,
            platform=identity.platform,
            tensor_parallel=identity.tensor_parallel,
            pipeline_parallel=identity.pipeline_parallel,
            latent=latent,
        )

    def __str__(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self.__struct_fields__)

    @property
    def replicated(self) -> bool:
        """More ranks than KV heads, so that several of them hold the same head."""
        return not self.latent and self.tensor_parallel > self.kv_heads


class Transfer(msgspec.Struct, frozen=True):
    """What a replica can do with other replicas' KV."""

    kind: Literal["nixl", "sim"]
    engine: str
    """Unique to one start of one engine: what was handed over by its predecessor is not there any more."""
    layout: KVLayout


_EQUAL = ("model", "engine", "kv_dtype", "layers", "kv_heads", "head_size", "layout", "platform", "latent")


def why_not(source: Transfer, target: Transfer) -> str:
    """Why `target` can't read KV of `source`; empty where it can. Names both layouts.

    Tensor parallel sizes may differ by a whole factor. What the engine would refuse, or die of, at the first transfer
    is refused here.
    """
    reason = _kinds(source, target) or _shapes(source.layout, target.layout)
    if not reason:
        return ""
    return f"{reason}; the one that computes has [{source.layout}], the one that answers [{target.layout}]"


def _kinds(source: Transfer, target: Transfer) -> str:
    if source.kind != target.kind:
        return f"KV leaves by {source.kind} and would arrive by {target.kind}"
    return ""


def _shapes(source: KVLayout, target: KVLayout) -> str:
    differ = [name for name in _EQUAL if getattr(source, name) != getattr(target, name)]
    if differ:
        return f"{', '.join(differ)} must be equal"
    if source.pipeline_parallel != 1 or target.pipeline_parallel != 1:
        return "pipeline_parallel must be 1"
    if source.block_tokens != target.block_tokens:
        return "block_tokens must be equal"
    more, fewer = (
        max(source.tensor_parallel, target.tensor_parallel),
        min(source.tensor_parallel, target.tensor_parallel),
    )
    if more % fewer:
        return "the larger tensor_parallel must be a multiple of the smaller"
    if source.tensor_parallel > target.tensor_parallel and source.replicated:
        return "tensor_parallel of the one that computes may not be above kv_heads and above the other's"
    return ""
