"""The folder of a disk tier: ours and nobody else's."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress

MARKER = ".manta-kv"
"""Says that the folder is a disk tier's, and is what its process holds locked."""
_NOT_FILES = frozenset({"lost+found"})
_POLL_S = 0.05


class DiskRefused(ValueError):
    """The folder can't be a disk tier's: a mistake in the configuration, which time does not mend."""


class DiskRoot:
    """A folder with our marker in it, locked for this process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._marker = os.path.join(path, MARKER)
        self._fd: int | None = None

    def acquire(self, wait_s: float = 0.0) -> None:
        """Make the folder where it is not there, mark it and lock it.

        Raises DiskRefused for a folder with files of others, and where another process still has it after
        `wait_s`; OSError where the disk does not work.
        """
        self.release()
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise DiskRefused(f"{self.path} is needed as a folder for chunks: {error.strerror}") from error
        if not os.path.lexists(self._marker):
            self._check_empty()
        # Not open for writing, so that the disk can be made read-only under us.
        fd = os.open(self._marker, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._lock(fd, time.monotonic() + wait_s)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        # For people alone, and a full or read-only disk can still be read from.
        with suppress(OSError), open(self._marker, "w", encoding="utf-8") as marker:
            marker.write(f"KV chunks of Manta, in use by process {os.getpid()}\n")

    def held(self) -> bool:
        """Whether the folder is still the one that was locked: it may have been removed, or mounted over."""
        if self._fd is None:
            return False
        ours = os.fstat(self._fd)
        try:
            there = os.stat(self._marker, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _check_empty(self) -> None:
        there = sorted(set(os.listdir(self.path)) - _NOT_FILES)
        if there:
            raise DiskRefused(
                f"{self.path} has files that are not Manta's ({', '.join(there[:3])}): "
                "give the disk tier a folder of its own, empty or not yet there"
            )

    def _lock(self, fd: int, deadline: float) -> None:
        while True:
            with suppress(BlockingIOError):
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.monotonic() >= deadline:
                said = os.pread(fd, 200, 0).decode(errors="replace").strip()
                raise DiskRefused(
                    f"{self.path} is in use by another process: give each node's disk tier a folder of its own"
                    + (f" (its marker says: {said})" if said else "")
                )
            time.sleep(_POLL_S)
