"""One chunk part as a file: written whole or not at all, and read with everything checked."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import NamedTuple

from cache_store.chunk import MAX_HEAD_BYTES, ChunkError, Head, Header, read_head, verify
from cache_store.chunk_path import IDENTITY_PREFIX_BYTES, PartPath, Stored, part_path

_FIRST_READ_BYTES = 4096
"""More than most heads have."""


class Asked(NamedTuple):
    """Which part somebody wants. What is not known of it is not compared."""

    key: bytes
    identity: bytes
    """The whole digest, or its first IDENTITY_PREFIX_BYTES."""
    rank: int
    world_size: int
    """0 for not known."""

    @property
    def path(self) -> PartPath:
        return part_path(self.identity, self.key, self.rank)


def check_asked(header: Header, asked: Asked) -> None:
    """Raises ChunkError for the header of another part."""
    short = len(asked.identity) == IDENTITY_PREFIX_BYTES
    found = Asked(
        header.key,
        header.identity[:IDENTITY_PREFIX_BYTES] if short else header.identity,
        header.rank,
        header.world_size if asked.world_size else 0,
    )
    for name, is_there, wanted in zip(Asked._fields, found, asked, strict=True):
        if is_there != wanted:
            raise ChunkError(f"chunk part of another {name}: {is_there!r}; asked for: {wanted!r}", "mismatch")


def check_payload(header: Header, payload: memoryview) -> None:
    """Raises ChunkError unless `payload` is the header's, byte for byte."""
    verify(
        header,
        payload,
        key=header.key,
        identity=header.identity,
        rank=header.rank,
        world_size=header.world_size,
    )


def create_file(path: str, pieces: list[memoryview], *, sync: bool) -> None:
    """Write a new file. Where OSError is raised, as much of it as was written may be there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        for piece in pieces:
            done = 0
            while done < len(piece):
                done += os.write(fd, piece[done:])
        if sync:
            os.fdatasync(fd)
    finally:
        os.close(fd)


def open_part(path: str) -> int:
    """A descriptor to read from. Raises ChunkError for what is no regular file, OSError otherwise."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise ChunkError(f"{path} is no regular file", "foreign") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ChunkError(f"{path} is no regular file", "foreign")
    return fd


def read_part(fd: int, asked: Asked, target: memoryview, *, check: bool) -> Header:
    """Put the payload at the start of `target`, format B. Its checksum is compared where `check` says so.

    Raises ChunkError, ValueError for a target that is too short, or OSError.
    """
    header, offset = _read_head(fd)
    check_asked(header, asked)
    if header.nbytes > len(target):
        raise ValueError(f"part of {header.nbytes} bytes for a target of {len(target)}")
    payload, done = target[: header.nbytes], 0
    while done < header.nbytes:
        read = os.preadv(fd, [payload[done:]], offset + done)
        if not read:
            raise ChunkError(f"payload of {done} bytes; the header says {header.nbytes}", "length")
        done += read
    if check:
        check_payload(header, payload)
    return header


def read_stored(path: str, where: PartPath) -> Stored:
    """What a file's head says of the part. Raises ChunkError unless it may be the part that `where` names."""
    fd = open_part(path)
    try:
        header, offset = _read_head(fd)
    finally:
        os.close(fd)
    if part_path(header.identity, header.key, header.rank) != where:
        raise ChunkError(f"{path} holds another part", "mismatch")
    return Stored(
        identity=header.identity,
        key=where.key,
        rank=header.rank,
        world_size=header.world_size,
        nbytes=header.nbytes,
        file_bytes=offset + header.nbytes,
        created=header.created,
        cost_s=header.cost_s,
        tenant=header.tenant,
    )


def remove_file(path: str, inode: int | None = None) -> int | None:
    """Bytes of the file that was removed; None where it is gone already, or is not the one of that inode.

    Raises OSError where it is there and can't be removed.
    """
    with suppress(FileNotFoundError):
        there = os.lstat(path)
        if inode is None or inode == there.st_ino:
            os.unlink(path)
            return there.st_size
    return None


def _read_head(fd: int) -> Head:
    """Also checks that the file is as long as its head says."""
    data = os.pread(fd, _FIRST_READ_BYTES, 0)
    try:
        head = read_head(data)
    except ChunkError:
        if len(data) < _FIRST_READ_BYTES:
            raise
        head = read_head(os.pread(fd, MAX_HEAD_BYTES, 0))
    size = os.fstat(fd).st_size
    if size != head.payload_offset + head.header.nbytes:
        raise ChunkError(
            f"file of {size} bytes; its head says {head.payload_offset + head.header.nbytes}", "length"
        )
    return head
