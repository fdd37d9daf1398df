"""Which chunk parts a remote file system has, found within limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from cache_store.chunk_path import Stored, is_identity_folder, is_shard, is_temporary, parse_path
from cache_store.tier_health import TierUnavailable

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo

    Ls = Callable[[str], list[FileInfo]]


STALE_S = 3600.0
"""Since a temporary file was last written to: far longer than any write may take."""


class Listing(NamedTuple):
    parts: list[Stored]
    """Only their paths were read: see `Stored`."""
    complete: bool
    """False where a limit or a failure ended it."""
    foreign: int
    """Files in the folders of parts that are none; not touched, since others write there too."""
    stale: list[str]
    """Paths of temporary files that nobody can be writing any more."""


def list_parts(
    ls: Ls, root: str, *, limit: int, limit_s: float, identity_folder: str | None = None
) -> Listing:
    """At most `limit` parts, and no further call of `ls` after `limit_s`.

    `ls` gives what is in one folder, or raises TierUnavailable: this is raised only where nothing was found before.
    """
    listing = Listing([], False, 0, [])
    try:
        for infos in _walk(ls, root, identity_folder, time.monotonic() + limit_s):
            if infos is None:
                return listing
            for info in infos:
                if len(listing.parts) == limit:
                    return listing
                listing = _with(listing, info, root)
    except TierUnavailable:
        if not listing.parts:
            raise
        return listing
    return listing._replace(complete=True)


def _with(listing: Listing, info: FileInfo, root: str) -> Listing:
    where = parse_path(info.path.removeprefix(f"{root}/"))
    written = (info.mtime_ns or 0) / 1e9
    if where is not None:
        part = Stored(where.identity, where.key, where.rank, 0, info.size, info.size, created=written)
        listing.parts.append(part)
    elif not is_temporary(info.base_name):
        return listing._replace(foreign=listing.foreign + 1)
    elif time.time() - written > STALE_S:
        listing.stale.append(info.path)
    return listing


def _walk(ls: Ls, root: str, identity_folder: str | None, deadline: float) -> Iterator[list[FileInfo] | None]:
    """The files of one folder of parts after the other; None, last, where the deadline came first.

    Folder by folder, since pyarrow answers with a whole listing at once, and a bucket's can be of any length.
    """
    identities = [f"{root}/{identity_folder}"] if identity_folder else _folders(ls, root, is_identity_folder)
    for identity in identities:
        for shard in _folders(ls, identity, is_shard):
            if time.monotonic() >= deadline:
                yield None
                return
            yield [info for info in ls(shard) if info.is_file]


def _folders(ls: Ls, path: str, named: Callable[[str], bool]) -> list[str]:
    return [info.path for info in ls(path) if not info.is_file and named(info.base_name)]
