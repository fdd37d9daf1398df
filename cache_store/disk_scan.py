"""What is in a disk tier's folder, after what is of no use was removed from it."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cache_store.chunk import ChunkError
from cache_store.chunk_path import Stored, is_identity_folder, is_shard, is_temporary, parse_path
from cache_store.disk_root import MARKER
from cache_store.part_file import read_stored, remove_file

_BAD_FILE = frozenset({errno.EIO, errno.EACCES, errno.EPERM})
"""Errors that say something about one file; others are about the disk or this process."""


class Scanned(NamedTuple):
    parts: list[Stored]
    """Oldest first."""
    removed: Counter[str]
    """Files that were removed, by reason: `temporary`, `unreadable`, or a `cache_store.chunk.Fault`."""
    doomed: dict[str, int]
    """Paths and bytes of files that should have been removed and could not be."""
    left: int
    """Entries that are not ours, where our parts are not: not touched."""


def scan_folder(root: str) -> Scanned:
    """Removes what is torn, temporary or foreign where our parts are. Reads heads, no payloads.

    For when nobody writes there. Raises OSError where the disk does not work.
    """
    scanned = Scanned([], Counter(), {}, 0)
    for entry in part_entries(root):
        try:
            scanned.parts.append(_stored(root, entry))
            continue
        except FileNotFoundError:
            continue
        except ChunkError as error:
            reason: str = "temporary" if is_temporary(entry.name) else error.fault
        except OSError as error:
            if error.errno not in _BAD_FILE:
                raise
            reason = "unreadable"
        _remove(entry, reason, scanned)
    for entry in _entries(root):
        if is_temporary(entry.name) and not _is_folder(entry):
            _remove(entry, "temporary", scanned)
    scanned.parts.sort(key=lambda stored: stored.created)
    # A shared digest instead of one per part: there may be a million.
    digests: dict[bytes, bytes] = {}
    parts = [
        part._replace(identity=digests.setdefault(part.identity, part.identity)) for part in scanned.parts
    ]
    return scanned._replace(parts=parts, left=_count_others(root))


def part_entries(root: str) -> Iterator[os.DirEntry[str]]:
    """All that is no folder where parts are: `<root>/<identity>/<shard>/`."""
    for identity in _folders(root, is_identity_folder):
        for shard in _folders(identity.path, is_shard):
            yield from (entry for entry in _entries(shard.path) if not _is_folder(entry))


def _stored(root: str, entry: os.DirEntry[str]) -> Stored:
    where = parse_path(os.path.relpath(entry.path, root))
    if where is None:
        raise ChunkError(f"{entry.path} is not named as a part is", "foreign")
    return read_stored(entry.path, where)


def _remove(entry: os.DirEntry[str], reason: str, scanned: Scanned) -> None:
    try:
        scanned.removed[reason] += remove_file(entry.path) is not None
    except OSError:
        scanned.doomed[entry.path] = entry.stat(follow_symlinks=False).st_size


def _count_others(root: str) -> int:
    count = sum(not is_identity_folder(entry.name) and entry.name != MARKER for entry in _entries(root))
    for identity in _folders(root, is_identity_folder):
        count += sum(not is_shard(entry.name) for entry in _entries(identity.path))
        for shard in _folders(identity.path, is_shard):
            count += sum(_is_folder(entry) for entry in _entries(shard.path))
    return count


def _folders(path: str, named: Callable[[str], bool]) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in _entries(path) if _is_folder(entry) and named(entry.name))


def _entries(path: str) -> Iterator[os.DirEntry[str]]:
    """Nothing for a folder that is gone."""
    try:
        with os.scandir(path) as entries:
            yield from entries
    except FileNotFoundError:
        return


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)
