"""The files of a disk tier, and the books on their bytes."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress

from cache_store.byte_budget import ByteBudget
from cache_store.chunk_path import Stored, is_temporary, parse_path, part_path, temporary_name
from cache_store.disk_scan import part_entries, scan_folder
from cache_store.part_file import create_file, remove_file
from cache_store.tier_health import NoRoom

_PROBE_BYTES = 64 * 1024
_NAME_LOCKS = 64
_RECOUNT_S = 60.0
_RESIZED = frozenset({"length", "torn", "foreign"})


class DiskFiles:
    """Files below one folder, never more than `capacity` bytes of them, not even while one is written.

    Nobody else should write there; where somebody did, the books err on the side of too many bytes until they are
    counted again. Thread-safe. Everything raises OSError where the disk does not work, unless it says otherwise.
    """

    def __init__(self, root: str, capacity: int, *, sync: bool, clock: Callable[[], float]) -> None:
        self.removed: Counter[str] = Counter()
        self.left = 0
        self._root = root
        self._sync = sync
        self._clock = clock
        self._budget = ByteBudget(capacity)
        # A file was not as it was left, so that what is counted may be too much.
        self._disputed = False
        self._recount_at = clock()
        # Should have been removed and could not be.
        self._doomed: set[str] = set()
        self._counting = threading.Lock()
        # Two that change one name take turns, so that the size of the file that a rename replaces is known.
        self._name_locks = [threading.Lock() for _ in range(_NAME_LOCKS)]

    @property
    def used(self) -> int:
        return self._budget.used

    def take_in(self) -> list[Stored]:
        """See `DiskTier.scan`. For when nobody else is at work here."""
        scanned = scan_folder(self._root)
        self.removed += scanned.removed
        self.left = scanned.left
        self._doomed = set(scanned.doomed)
        self._disputed = False
        there = sum(part.file_bytes for part in scanned.parts) + sum(scanned.doomed.values())
        self._budget.correct(there)
        return scanned.parts[self._trim(scanned.parts) :]

    def put(self, path: str, pieces: list[memoryview]) -> int:
        """Write a whole file, in place of one of that name; its bytes. Raises NoRoom."""
        size = sum(len(piece) for piece in pieces)
        self._reserve(size)
        temporary = temporary_name(path)
        try:
            try:
                create_file(temporary, pieces, sync=self._sync)
            except FileNotFoundError:
                _make_folders(path)
                create_file(temporary, pieces, sync=self._sync)
            with self._name_lock(path):
                replaced = _size(path)
                os.rename(temporary, path)
                self._budget.settle(size, size - replaced)
                self._doomed.discard(path)
        except BaseException:
            self._budget.settle(size, self._left_of(temporary))
            raise
        return size

    def remove(self, path: str) -> None:
        """Nothing where it is not there."""
        if not self._unlink(path):
            self._disputed = True

    def missed(self) -> None:
        """A file that should be there is not."""
        self._disputed = True

    def doom(self, path: str) -> None:
        """Remove it when that is possible again; it counts until then."""
        self._doomed.add(path)

    def remove_doomed(self) -> None:
        for path in list(self._doomed):
            with suppress(OSError):
                self._unlink(path)

    def discard(self, path: str, reason: str, inode: int | None) -> None:
        """Remove and count a file that is of no use, unless another has taken its name since. Does not raise."""
        # One that others have changed may not have counted as the bytes that it has now.
        self._disputed |= reason in _RESIZED
        try:
            with self._name_lock(path):
                size = remove_file(path, inode)
                self._budget.add(0 if reason in _RESIZED else -(size or 0))
        except OSError:
            self.doom(path)
        else:
            with self._counting:
                self.removed[reason] += size is not None

    def try_writing(self) -> None:
        """Whether the disk takes bytes, as far as the cap leaves room to try."""
        path = f"{self._root}/{temporary_name('probe')}"
        size = self._budget.reserve_up_to(_PROBE_BYTES)
        try:
            create_file(path, [memoryview(bytes(size))], sync=True)
        finally:
            self._budget.settle(size, self._left_of(path))

    def recount(self) -> None:
        """Learn what is there after others have removed or changed files. It takes seconds for a million."""
        self._disputed = False
        self._recount_at = self._clock() + _RECOUNT_S
        with ExitStack() as quiet:
            for lock in self._name_locks:
                quiet.enter_context(lock)
            self._budget.correct(sum(self._files().values()))

    def check_integrity(self) -> None:
        """Raises AssertionError when the books contradict the folder. Call it with no operation under way."""
        self._budget.check_integrity()
        files = self._files()
        for path in files:
            assert path in self._doomed or parse_path(os.path.relpath(path, self._root)), path
        assert self._disputed or sum(files.values()) == self.used
        assert self._doomed or self.used <= self._budget.capacity

    def _reserve(self, size: int) -> None:
        if self._disputed and self._clock() >= self._recount_at and not self._budget.has_room(size):
            self.recount()
        if not self._budget.reserve(size):
            raise NoRoom(
                f"disk {self._root}: {size} bytes beside {self.used} would be above the cap of {self._budget.capacity}"
            )

    def _trim(self, parts: list[Stored]) -> int:
        """Remove from the front until the cap is kept; how many are of no use any more."""
        for number, part in enumerate(parts):
            if self.used <= self._budget.capacity or self._doomed:
                return number
            self.discard(f"{self._root}/{part_path(part.identity, part.key, part.rank)}", "over_cap", None)
        return len(parts)

    def _unlink(self, path: str) -> bool:
        """Whether it was there and is not any more."""
        with self._name_lock(path):
            size = remove_file(path)
            self._budget.add(-(size or 0))
            self._doomed.discard(path)
            return size is not None

    def _left_of(self, temporary: str) -> int:
        """Bytes that remain of a temporary file after trying to remove it."""
        try:
            remove_file(temporary)
        except OSError:
            self.doom(temporary)
            return _size(temporary)
        return 0

    def _name_lock(self, path: str) -> threading.Lock:
        return self._name_locks[hash(path) % _NAME_LOCKS]

    def _files(self) -> dict[str, int]:
        """Paths and bytes of files, without those that are being written."""
        found = {path: size for path in list(self._doomed) if (size := _size(path))}
        for entry in part_entries(self._root):
            if not is_temporary(entry.name):
                with suppress(FileNotFoundError):
                    found[entry.path] = entry.stat(follow_symlinks=False).st_size
        return found


def _make_folders(path: str) -> None:
    """The two that a part lies in; the root is there or an error."""
    shard = os.path.dirname(path)
    for folder in (os.path.dirname(shard), shard):
        with suppress(FileExistsError):
            os.mkdir(folder, mode=0o700)


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0
