"""The seam between a node's store and where it keeps files of chunk parts: its disk, or a remote file system."""

from __future__ import annotations

from typing import Protocol

from cache_store.chunk import Header
from cache_store.chunk_path import Stored


class FileTier(Protocol):
    """Every method blocks and is called from threads, several at once; `scan` comes first.

    Any of them raises `tier_health.TierUnavailable` while the storage does not work.
    """

    @property
    def capacity(self) -> int:
        """Most bytes of files; 0 for no limit."""
        ...

    @property
    def used(self) -> int:
        """Bytes of files, those that are being written included; 0 where that is not counted."""
        ...

    @property
    def readable(self) -> bool: ...

    @property
    def writable(self) -> bool: ...

    def scan(self) -> list[Stored]:
        """All parts that are there, oldest first. Raises OSError or ValueError too, where it can't be used."""
        ...

    def write(self, header: Header, payload: memoryview) -> int:
        """Bytes of the file. Raises `tier_health.NoRoom` when that would be above the capacity."""
        ...

    def read_into(
        self, key: bytes, identity: bytes, rank: int, target: memoryview, *, world_size: int
    ) -> Header:
        """Put the payload, verified, at the start of `target`.

        `identity` and `world_size` are what `scan` said of the part: only the beginning of the digest, and 0, where
        it had only the path to go by. What is not known is not compared; the payload still is with its checksum.
        Raises `tier_health.PartMissing`, or ChunkError for a file that is not the part, which then is removed.
        """
        ...

    def delete(self, key: bytes, identity: bytes, rank: int) -> None: ...

    def probe(self) -> bool:
        """Try out what does not work, where it is time to; whether all works."""
        ...

    def close(self) -> None: ...
