"""How many bytes of a node's object store its chunks may take."""

from __future__ import annotations

import os

from cache_store.node_errors import CacheSetupError

SHARE = 0.6
"""Of the object store, where the configuration gives no number."""
MOST = 0.9
"""Of the object store, at most: the rest is for objects of others and for the gaps between objects. Over it Ray would
spill chunks to disk, which is slower than the disk tier."""


def dram_budget(asked: int, object_store: int, shm: int | None = None) -> int:
    """Bytes for chunks. `asked` 0 is a share of the object store; `shm` is the size of /dev/shm, read where not given.

    Raises CacheSetupError, naming both numbers, when the object store or /dev/shm is too small.
    """
    shared = shared_memory_bytes() if shm is None else shm
    if object_store > shared:
        raise CacheSetupError(
            f"Ray's object store has {_mib(object_store)} MiB and /dev/shm only {_mib(shared)} MiB; needed: a "
            f"/dev/shm of at least the object store's size, or a smaller `object_store_memory`"
        )
    if asked > MOST * object_store:
        raise CacheSetupError(
            f"cache.dram.mib is {_mib(asked)} and Ray's object store on this node has {_mib(object_store)} MiB; "
            f"needed: at most {_mib(int(MOST * object_store))}, or an object store of at least "
            f"{_mib(int(asked / MOST) + (1 << 20))} MiB"
        )
    return asked or int(SHARE * object_store)


def shared_memory_bytes(path: str = "/dev/shm") -> int:
    """Size of the file system there; what is free changes."""
    found = os.statvfs(path)
    return found.f_frsize * found.f_blocks


def _mib(size: int) -> int:
    return size >> 20
