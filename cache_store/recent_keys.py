"""Which keys were seen lately, in eight bytes each."""

from __future__ import annotations

from array import array

from cache_store.events import ChunkKey

WAYS = 8
"""Fingerprints in a bucket. More make forgetting more like first in, first out, and each question slower."""


class RecentKeys:
    """A set of at most `capacity` fingerprints of keys, rounded up to whole buckets; old ones make room for new ones.

    Chunk keys are hashes: eight bytes of one are a fingerprint, and choose its bucket. A bucket forgets its oldest
    when it is full, so that a key is forgotten after about `capacity` others, not after exactly so many.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity >= 1, capacity
        self._buckets = -(-capacity // WAYS)
        self._table = array("Q", bytes(8 * WAYS * self._buckets))

    @property
    def capacity(self) -> int:
        return len(self._table)

    def __contains__(self, key: ChunkKey) -> bool:
        fingerprint = _fingerprint(key)
        return fingerprint in self._bucket(fingerprint)

    def add(self, key: ChunkKey) -> bool:
        """True when the key was remembered already. It is the newest of its bucket from now on."""
        return self._add(_fingerprint(key))

    def discard(self, key: ChunkKey) -> None:
        fingerprint = _fingerprint(key)
        bucket = self._bucket(fingerprint)
        if fingerprint in bucket:
            bucket.remove(fingerprint)
            bucket.append(0)
            self._store(fingerprint, bucket)

    def double(self) -> None:
        """Remember twice as many; nothing is forgotten, for a bucket's contents go to two."""
        old, self._buckets = self._table, 2 * self._buckets
        self._table = array("Q", bytes(8 * WAYS * self._buckets))
        # Newest first within a bucket: backwards, each old one is added before what is newer.
        for fingerprint in reversed(old):
            if fingerprint:
                self._add(fingerprint)

    def _add(self, fingerprint: int) -> bool:
        bucket = self._bucket(fingerprint)
        known = fingerprint in bucket
        if known:
            bucket.remove(fingerprint)
        else:
            bucket.pop()
        bucket.insert(0, fingerprint)
        self._store(fingerprint, bucket)
        return known

    def _bucket(self, fingerprint: int) -> array[int]:
        start = fingerprint % self._buckets * WAYS
        return self._table[start : start + WAYS]

    def _store(self, fingerprint: int, bucket: array[int]) -> None:
        start = fingerprint % self._buckets * WAYS
        self._table[start : start + WAYS] = bucket


def _fingerprint(key: ChunkKey) -> int:
    """Never zero, which stands for nothing."""
    return int.from_bytes(key[:8], "little") or 1
