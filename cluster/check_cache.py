"""The part of `manta check` that concerns the `cache` section."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from cache_store.memory_budget import dram_budget
from cache_store.node_errors import CacheSetupError
from cache_store.remote_uri import open_remote
from cluster.config import ClusterConfig

MIB = 1 << 20
Found = tuple[Literal["ok", "warning", "error"], str, str]
"""Level, subject and message."""


def cache_findings(
    config: ClusterConfig, shm: int, disk_free: Callable[[Path], int] | None = None
) -> Iterator[Found]:
    """`shm`: bytes of /dev/shm. `disk_free`: free bytes of a folder's file system, asked of the system by default."""
    cache = config.cache
    if cache.share == "off":
        return
    if config.engine.kind == "sim":
        yield "warning", "cache", "cache.share has no effect: simulated engines have no KV to share"
        return
    object_store = config.ray.object_store_mib * MIB
    try:
        budget = dram_budget(cache.dram.mib * MIB, object_store, max(shm, object_store))
    except CacheSetupError as error:
        yield "error", "cache memory", str(error)
    else:
        yield (
            "ok",
            "cache memory",
            f"{budget >> 20} MiB of Ray's object store of {config.ray.object_store_mib} MiB",
        )
    if cache.disk.path:
        yield _disk(Path(cache.disk.path), cache.disk.mib * MIB, disk_free or _free)
    if cache.remote.uri:
        yield _remote(cache.remote.uri)


def _disk(path: Path, wanted: int, free: Callable[[Path], int]) -> Found:
    there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        return "error", "cache disk", f"{there} is no folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return (
            "error",
            "cache disk",
            f"{there} can't be written to; needed: a folder of the cache's own at {path}",
        )
    room = free(there)
    if room < wanted:
        found = f"cache.disk.mib is {wanted >> 20} and {there} has {room >> 20} MiB free"
        return "warning", "cache disk", f"{found}, what is cached there already not counted"
    return "ok", "cache disk", f"{wanted >> 20} MiB at {path}"


def _remote(uri: str) -> Found:
    try:
        return "ok", "cache remote", open_remote(uri).shown
    except ValueError as error:
        return "error", "cache remote", str(error)


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free
