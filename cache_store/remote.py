"""Chunk parts in a file system that all nodes reach."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from cache_store.chunk import MAX_HEAD_BYTES, ChunkError, Header, encode_head, read_head
from cache_store.chunk_path import IDENTITY_PREFIX_BYTES, Stored, part_path, temporary_name
from cache_store.part_file import Asked, check_asked, check_payload
from cache_store.remote_listing import Listing, list_parts
from cache_store.remote_uri import HINTS, open_remote
from cache_store.tier_health import PartMissing, TierHealth, TierUnavailable
from cache_store.timed_calls import TimedCalls

if TYPE_CHECKING:
    from pyarrow import Buffer
    from pyarrow.fs import FileInfo, FileSystem

logger = logging.getLogger(__name__)

T = TypeVar("T")
_PROBE_BYTES = 1024


class RemoteTier:
    """Files of chunk parts under a URI that pyarrow.fs opens: `s3://`, `gs://`, `file://` and what else it knows.

    Methods as those of `DiskTier`, with the same errors; there is no cap, and the folder is shared with other nodes.
    Every method ends within `limit_s`, whatever the store does, and `target` is written to by the caller's thread
    alone. A part appears whole or not at all.
    """

    def __init__(
        self,
        uri: str,
        *,
        limit_s: float = 10.0,
        probe_s: float = 10.0,
        calls: int = 16,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`calls`: how many may be under way at once. Raises ValueError for a URI that can't be used; asks nothing
        of the store yet."""
        self._place = open_remote(uri)
        self.shown = self._place.shown
        """The URI for people, without secrets."""
        # Calls end at their limit by themselves: one that is about to is not yet one that hangs.
        hang_s = 1.25 * limit_s
        self.reading = TierHealth(f"reads from {self.shown}", limit_s=hang_s, probe_s=probe_s, clock=clock)
        self.writing = TierHealth(f"writes to {self.shown}", limit_s=hang_s, probe_s=probe_s, clock=clock)
        self.removed: Counter[str] = Counter()
        """Files of no use, by `cache_store.chunk.Fault`, and `temporary` ones that nobody writes any more."""
        self._limit_s = limit_s
        self._calls = TimedCalls(self.shown, calls)
        self._counting = threading.Lock()
        self._open = True
        self._listed_whole = True

    @property
    def readable(self) -> bool:
        return self._open and self.reading.works()

    @property
    def writable(self) -> bool:
        return self._open and self.writing.works()

    @property
    def used(self) -> int:
        """0: not counted."""
        return 0

    @property
    def capacity(self) -> int:
        """0: no limit."""
        return 0

    def check(self) -> None:
        """Write a small file, read it back and remove it. Raises TierUnavailable that says what to look at."""
        try:
            with self._operation(self.writing):
                self._run(self._round_trip)
        except TierUnavailable as error:
            raise TierUnavailable(f"{error}. {HINTS.get(self._place.scheme, '')}".rstrip()) from error

    def write(self, header: Header, payload: memoryview) -> int:
        """Keep a part, in place of one of the same name; bytes of its file."""
        head = encode_head(header)
        if payload.nbytes != header.nbytes:
            raise ChunkError(f"payload of {payload.nbytes} bytes; the header says {header.nbytes}", "length")
        path = self._path(str(part_path(header.identity, header.key, header.rank)))
        # A copy: a call that is left behind still reads from it.
        data = b"".join((head, payload.cast("B")))
        with self._operation(self.writing):
            self._run(lambda: self._put(path, data))
        return len(data)

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
        """`identity` and `world_size` may be what `scan` said of the part: what is not known is not compared."""
        asked = Asked(key, identity, rank, world_size)
        path = self._path(str(asked.path))
        with self._operation(self.reading):
            try:
                data = self._run(lambda: self._get(path, MAX_HEAD_BYTES + target.nbytes))
            except FileNotFoundError:
                raise PartMissing(f"{path} is not there") from None
        try:
            return _take(memoryview(data).cast("B"), asked, target.cast("B"), verify)
        except ChunkError as error:
            self._discard(path, error.fault)
            raise

    def delete(self, key: bytes, identity: bytes, rank: int) -> None:
        """Remove a part, if it is there and the store works. Never raises."""
        self._remove(self._path(str(part_path(identity, key, rank))))

    def scan(self) -> list[Stored]:
        """Parts that are there, oldest first, as far as `listing` finds them within its limits. What writers that
        were killed left behind is removed."""
        listing = self.listing()
        for path in listing.stale:
            self._discard(path, "temporary")
        if self._listed_whole and not listing.complete:
            found = len(listing.parts)
            logger.warning("%s has more parts than one listing finds: %d are known here", self.shown, found)
        self._listed_whole = listing.complete
        return sorted(listing.parts, key=lambda part: part.created)

    def listing(self, limit: int = 100_000, limit_s: float = 30.0, identity: bytes | None = None) -> Listing:
        """Parts that are there, of one engine identity or all: see `list_parts`."""
        folder = identity[:IDENTITY_PREFIX_BYTES].hex() if identity else None
        return list_parts(self._ls, self._place.root, limit=limit, limit_s=limit_s, identity_folder=folder)

    def probe(self) -> bool:
        """Try out what is off, where it is time to; whether all works. For a caller every second or so."""
        if self._open and self.writing.due():
            with suppress(TierUnavailable):
                self.check()
        if self._open and self.reading.due():
            with suppress(TierUnavailable), self._operation(self.reading):
                self._run(self._try_reading)
        return self.readable and self.writable

    def close(self) -> None:
        """Refuse operations from here on; those under way are not waited for."""
        self._open = False

    def check_integrity(self) -> None:
        self.reading.check_integrity()
        self.writing.check_integrity()

    def _path(self, relative: str) -> str:
        return f"{self._place.root}/{relative}"

    @contextmanager
    def _operation(self, health: TierHealth) -> Iterator[None]:
        if not self._open:
            raise TierUnavailable(f"{self.shown} is closed")
        with health.operation():
            yield

    def _run(self, call: Callable[[], T]) -> T:
        """Raises OSError for all that can go wrong between here and the store."""
        try:
            return self._calls.run(call, self._limit_s)
        except (FileNotFoundError, TimeoutError):
            raise
        except Exception as error:
            # What pyarrow says of answers that it does not understand is not always an OSError.
            code = getattr(error, "errno", None)
            raise (OSError(code, _short(error)) if code else OSError(_short(error))) from error

    def _put(self, path: str, data: bytes) -> None:
        files = self._place.files
        if not self._place.has_folders:
            _store(files, path, data)
            return
        temporary = temporary_name(path)
        try:
            try:
                _store(files, temporary, data)
            except FileNotFoundError:
                files.create_dir(path.rpartition("/")[0], recursive=True)
                _store(files, temporary, data)
            files.move(temporary, path)
        except BaseException:
            with suppress(OSError):
                files.delete_file(temporary)
            raise

    def _get(self, path: str, most: int) -> Buffer:
        """At most `most` bytes from the start. Raises FileNotFoundError."""
        with self._place.files.open_input_file(path) as stream:
            return stream.read_buffer(min(stream.size(), most))

    def _drop(self, path: str) -> None:
        files = self._place.files
        try:
            files.delete_file(path)
        except FileNotFoundError:
            return
        except OSError:
            # pyarrow leaves an empty marker for a folder that may have become empty; stores that refuse it have
            # removed the file before.
            if files.get_file_info(path).is_file:
                raise

    def _round_trip(self) -> None:
        data = secrets.token_bytes(_PROBE_BYTES)
        path = self._path(temporary_name("probe"))
        self._put(path, data)
        found = self._get(path, MAX_HEAD_BYTES)
        self._drop(path)
        if found.to_pybytes() != data:
            raise OSError(f"gave back {found.size} other bytes than the {len(data)} that were written")

    def _try_reading(self) -> None:
        with suppress(FileNotFoundError):
            self._get(self._path(temporary_name("probe")), _PROBE_BYTES)

    def _discard(self, path: str, reason: str) -> None:
        # Nodes that run another version may share the folder.
        if reason != "version":
            self._remove(path)
        with self._counting:
            self.removed[reason] += 1

    def _remove(self, path: str) -> None:
        with suppress(TierUnavailable), self._operation(self.writing):
            self._run(lambda: self._drop(path))

    def _ls(self, path: str) -> list[FileInfo]:
        from pyarrow.fs import FileSelector

        selector = FileSelector(path, allow_not_found=True)
        with self._operation(self.reading):
            return self._run(lambda: self._place.files.get_file_info(selector))


def _short(error: Exception) -> str:
    """Google's library appends where in its sources the error came about."""
    return (getattr(error, "strerror", None) or str(error)).partition(" error_info=")[0]


def _store(files: FileSystem, path: str, data: bytes) -> None:
    with files.open_output_stream(path, compression=None) as stream:
        stream.write(data)


def _take(data: memoryview, asked: Asked, target: memoryview, check: bool) -> Header:
    """Copy the payload out of a whole file. Raises as `part_file.read_part` does."""
    header, offset = read_head(data[:MAX_HEAD_BYTES])
    check_asked(header, asked)
    if header.nbytes > len(target):
        raise ValueError(f"part of {header.nbytes} bytes for a target of {len(target)}")
    if len(data) != offset + header.nbytes:
        raise ChunkError(
            f"file of {len(data)} bytes or more; its head says {offset + header.nbytes}", "length"
        )
    payload = target[: header.nbytes]
    payload[:] = data[offset:]
    if check:
        check_payload(header, payload)
    return header
