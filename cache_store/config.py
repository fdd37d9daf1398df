"""The `cache` section of a Manta configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DramConfig(Section):
    """Chunks in the Ray object store of every node that runs a replica."""

    mib: int = Field(
        0,
        ge=0,
        description="Bytes of chunks in a node's memory, in MiB; 0 leaves the node's object store share.",
    )
    eviction: Literal["lru", "s3fifo", "cost"] = Field(
        "cost", description="Which chunk leaves first; `cost` keeps what takes longest to compute per byte."
    )
    pull_timeout_s: float = Field(5.0, gt=0, description="Longest wait for a chunk from another node.")


class DiskConfig(Section):
    """Chunks on a node's own disk; they outlive the node's processes."""

    path: str = Field("", description="Folder; no disk tier where empty. Each cluster needs one of its own.")
    mib: int = Field(4096, ge=1, description="Bytes of files, in MiB; never more, not even while writing.")
    eviction: Literal["lru", "s3fifo", "cost"] = Field("lru", description="Which chunk leaves first.")
    admission: Literal["always", "second_touch"] = Field(
        "second_touch", description="Which chunks are written: all, or those that are asked for again."
    )
    timeout_s: float = Field(5.0, gt=0, description="A read that takes longer is a miss.")


class RemoteConfig(Section):
    """Chunks in a file system that all nodes reach."""

    uri: str = Field(
        "", description="`s3://bucket/prefix`, `gs://...` or `file:///...`; no remote tier where empty."
    )
    admission: Literal["always", "second_touch"] = Field(
        "second_touch", description="Which chunks are written: all, or those that are asked for again."
    )
    timeout_s: float = Field(10.0, gt=0, description="A read that takes longer is a miss.")


class CacheConfig(Section):
    """How KV is cut into the units that the cluster knows, and where those are kept."""

    chunk_tokens: int = Field(
        256,
        ge=1,
        description="Tokens per chunk; a whole number of engine blocks. Only full chunks are shared.",
    )
    share: Literal["on", "off", "auto"] = Field(
        "off",
        description="Whether engines save KV to the cluster and load it from there; `auto` serves a model whose KV "
        "can't be shared without sharing it, `on` refuses it.",
    )
    load_when: Literal["faster", "always"] = Field(
        "faster",
        description="`faster`: chunks are loaded when measured rates say that it beats computing them; `always`: "
        "whenever they are there.",
    )
    every_node: bool = Field(
        False, description="A cache actor on nodes without replicas too, for their memory and disks."
    )
    dram: DramConfig = DramConfig()
    disk: DiskConfig = DiskConfig()
    remote: RemoteConfig = RemoteConfig()
    ttl_s: float | None = Field(None, gt=0, description="Chunks not used for so long are dropped.")
    save_mib_in_flight: int = Field(
        256, ge=1, description="Bytes being saved on a node at once, in MiB; what comes on top is dropped."
    )
    staging_mib: int = Field(
        64, ge=1, description="Shared memory of an engine worker through which chunks cross, in MiB."
    )
    quota_mib: dict[str, int] = Field(
        default_factory=dict, description="Bytes of chunks in a node's memory by tenant, in MiB."
    )
    default_quota_mib: int | None = Field(
        None, ge=1, description="For tenants that `quota_mib` does not name; no limit where not given."
    )
