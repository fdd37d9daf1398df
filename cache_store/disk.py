"""Chunk parts on a node's own disk."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cache_store.chunk import ChunkError, Header, encode_head
from cache_store.chunk_path import Stored, part_path
from cache_store.disk_files import DiskFiles
from cache_store.disk_root import DiskRefused, DiskRoot
from cache_store.part_file import Asked, open_part, read_part
from cache_store.tier_health import PartMissing, TierHealth, TierUnavailable


class DiskTier:
    """Files of chunk parts under one folder, never more than `capacity` bytes of them, not even while writing.

    All methods block and may be called from several threads; `scan` comes first and runs alone. A part is complete
    under its name or not there: it is written under a temporary one and renamed. Bytes are those of files, heads
    and what is half written included.

    When the disk fails, is full, read-only or slow, reads or writes are refused with TierUnavailable until it works
    again (`TierHealth`); a full or read-only disk is still read from. A file that is not what it should be is never
    handed out: it is removed, and counted in `removed`.
    """

    def __init__(
        self,
        root: str,
        capacity_bytes: int,
        *,
        limit_s: float = 5.0,
        probe_s: float = 5.0,
        sync: bool = False,
        lock_wait_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit_s`: an operation that takes longer counts as failed. `sync`: parts survive a power cut; without
        it one may be torn by it, which shows when it is read. `lock_wait_s`: how long `scan` waits for another
        process to leave the folder. The disk is not touched yet."""
        self.root = os.path.abspath(root)
        self.capacity = capacity_bytes
        self.reading = TierHealth(
            f"reads from disk {self.root}", limit_s=limit_s, probe_s=probe_s, clock=clock
        )
        self.writing = TierHealth(
            f"writes to disk {self.root}", limit_s=limit_s, probe_s=probe_s, clock=clock
        )
        self._lock_wait_s = lock_wait_s
        self._folder = DiskRoot(self.root)
        self._files = DiskFiles(self.root, capacity_bytes, sync=sync, clock=clock)
        self._open = False

    @property
    def used(self) -> int:
        """Bytes of files, with what is reserved for those being written."""
        return self._files.used

    @property
    def removed(self) -> Counter[str]:
        """Files removed, by reason: `temporary`, `over_cap`, `unreadable`, or a `cache_store.chunk.Fault`."""
        return self._files.removed

    @property
    def left(self) -> int:
        """Entries under the root, at the last scan, that are not ours and not where our parts are: not touched."""
        return self._files.left

    @property
    def readable(self) -> bool:
        return self._open and self.reading.works()

    @property
    def writable(self) -> bool:
        return self._open and self.writing.works()

    def claim(self) -> None:
        """Take the folder, so that what is wrong with it is said before anything else starts. Raises DiskRefused;
        a disk that does not work now is one that `scan` tries again."""
        with suppress(OSError):
            self._folder.acquire(self._lock_wait_s)

    def scan(self) -> list[Stored]:
        """Take the folder and list its parts, oldest first. Removes what is torn, temporary or foreign where our
        parts are, and the oldest where they are more than the cap.

        Heads are read, payloads are not. Raises DiskRefused (see `DiskRoot.acquire`), or TierUnavailable where the
        disk does not work: call it again later.
        """
        self._open = False
        try:
            self._folder.acquire(self._lock_wait_s)
            found = self._files.take_in()
        except OSError as error:
            raise TierUnavailable(f"disk {self.root}: {error}") from error
        self._open = True
        return found

    def write(self, header: Header, payload: memoryview) -> int:
        """Keep a part; bytes of its file. A part of the same name is replaced, and needs room for both meanwhile.

        Raises NoRoom or TierUnavailable, and ChunkError for a header that is not this payload's.
        """
        head = encode_head(header)
        if payload.nbytes != header.nbytes:
            raise ChunkError(f"payload of {payload.nbytes} bytes; the header says {header.nbytes}", "length")
        path = self._path(str(part_path(header.identity, header.key, header.rank)))
        with self._operation(self.writing):
            if not self._folder.held():
                raise FileNotFoundError(errno.ENOENT, "the folder was removed or replaced", self.root)
            return self._files.put(path, [memoryview(head), payload.cast("B")])

    def read_into(
        self,
        key: bytes,
        identity: bytes,
        rank: int,
        target: memoryview,
        *,
        world_size: int,
        verify: bool = True,
    ) -> Header:
        """Put a part's payload at the start of `target` (writable, contiguous), which nothing writes to after this
        has ended. A `world_size` of 0 and the first IDENTITY_PREFIX_BYTES of an identity stand for what is not known,
        and is not compared. Without `verify` the payload's checksum is left to whoever uses it; all else is checked.

        Raises PartMissing, TierUnavailable, ValueError for a target that is too short, or ChunkError for a file that
        is not the part, after removing it.
        """
        asked = Asked(key, identity, rank, world_size)
        path = self._path(str(asked.path))
        with self._operation(self.reading):
            inode = None
            try:
                fd = open_part(path)
                try:
                    inode = os.fstat(fd).st_ino
                    return read_part(fd, asked, target.cast("B"), check=verify)
                finally:
                    os.close(fd)
            except FileNotFoundError:
                self._files.missed()
                raise PartMissing(f"{path} is not there") from None
            except ChunkError as error:
                self._files.discard(path, error.fault, inode)
                raise
            except OSError as error:
                if error.errno == errno.EIO:
                    self._files.discard(path, "unreadable", inode)
                raise

    def delete(self, key: bytes, identity: bytes, rank: int) -> None:
        """Remove a part, if it is there. One that can't be removed now counts until it can."""
        path = self._path(str(part_path(identity, key, rank)))
        try:
            # A full disk is off for writes, and removing is what mends it.
            with self._operation(self.writing, even_off=True):
                self._files.remove(path)
        except TierUnavailable:
            self._files.doom(path)

    def probe(self) -> bool:
        """Try out what is off, where it is time to; whether all works. For a caller every second or so."""
        with suppress(TierUnavailable), self._operation(self.writing, even_off=True):
            self._files.remove_doomed()
        if self._open and self.writing.due():
            with suppress(TierUnavailable), self.writing.operation():
                self._try_writing()
        if self._open and self.reading.due():
            with suppress(TierUnavailable), self.reading.operation():
                os.listdir(self.root)
        return self.readable and self.writable

    def close(self) -> None:
        """Give the folder free. Operations are refused from here on; end those under way first."""
        self._open = False
        self._folder.release()

    def check_integrity(self) -> None:
        """Raises AssertionError when the books contradict the folder. Call it with no operation under way."""
        self.reading.check_integrity()
        self.writing.check_integrity()
        self._files.check_integrity()

    def _path(self, relative: str) -> str:
        return f"{self.root}/{relative}"

    @contextmanager
    def _operation(self, health: TierHealth, even_off: bool = False) -> Iterator[None]:
        if not self._open:
            raise TierUnavailable(f"disk {self.root} is not open")
        with health.operation(even_off=even_off):
            yield

    def _try_writing(self) -> None:
        if not self._folder.held():
            try:
                self._folder.acquire()
            except DiskRefused as error:
                raise PermissionError(errno.EPERM, str(error)) from error
            self._files.recount()
        self._files.try_writing()
