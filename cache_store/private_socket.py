"""A Unix socket that only this user can open."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
from pathlib import Path

MAX_PATH_BYTES = 107
"""What the kernel takes as the name of a Unix socket."""
_BACKLOG = 64


class UnsafeFolder(RuntimeError):
    """Somebody else could get at a socket in this folder."""


class SocketInUse(RuntimeError):
    """Another process serves this socket."""


class PrivateSocket:
    """A listening, non-blocking socket alone in a folder with mode 0700.

    The folder and what is missing above it are made. It stays locked for as long as this lives: a socket file that is
    found in a folder without a lock is that of a dead server and is replaced.
    """

    def __init__(self, path: Path) -> None:
        """Raises UnsafeFolder, SocketInUse, ValueError for a path too long, FileExistsError for what is no socket."""
        self.path = Path(os.path.abspath(path))
        length = len(os.fsencode(self.path))
        if length > MAX_PATH_BYTES:
            raise ValueError(
                f"{self.path} has {length} bytes; a Unix socket's path has {MAX_PATH_BYTES} at most"
            )
        self._folder = _open_folder(self.path.parent)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._listen()
        except BaseException:
            self.socket.close()
            os.close(self._folder)
            raise

    def _listen(self) -> None:
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SocketInUse(f"{self.path} is served by another process: one server a folder") from None
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(self.path).st_mode):
                raise FileExistsError(f"{self.path} is there and is no socket")
            os.unlink(self.path)
        self.socket.bind(str(self.path))
        os.chmod(self.path, 0o600)
        self.socket.listen(_BACKLOG)

    def close(self) -> None:
        """Remove the socket and unlock the folder. Safe to call twice."""
        if self._folder < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.socket.close()
        os.close(self._folder)
        self._folder = -1


def peer_uid(connection: socket.socket) -> int:
    """Of the process that connected, as of then."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _open_folder(folder: Path) -> int:
    """A descriptor of the folder, which is made if need be. Raises UnsafeFolder unless it is ours alone."""
    for missing in reversed([path for path in (folder, *folder.parents) if not os.path.lexists(path)]):
        with contextlib.suppress(FileExistsError):
            missing.mkdir(mode=0o700)
    for parent in (folder.parent, folder.parent.resolve()):
        for path in (parent, *parent.parents):
            _check_parent(path)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UnsafeFolder(
            f"{folder} can't be opened as a folder, without following links: {error}"
        ) from error
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(descriptor)
        raise UnsafeFolder(
            f"{folder} belongs to user {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}; "
            f"needed: user {os.geteuid()} and mode 700"
        )
    return descriptor


def _check_parent(path: Path) -> None:
    """Whoever may rename what is in a folder could put another in its place."""
    found = os.lstat(path)
    if found.st_uid not in (0, os.geteuid()):
        raise UnsafeFolder(f"{path} belongs to user {found.st_uid}; needed: root or user {os.geteuid()}")
    if stat.S_ISDIR(found.st_mode) and found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise UnsafeFolder(f"{path} can be written by others: mode {stat.S_IMODE(found.st_mode):o}")
