"""Shared memory through which chunk payloads cross between an engine and the cache actor of its node."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MAX_SLOTS = 65_536


class StagingError(ValueError):
    """A file descriptor that is not the shared memory it was said to be."""


class StagingArea:
    """Memory cut into `slots` slots of `slot_bytes` bytes, one behind the other, mapped by both sides.

    Who may touch a slot is said by the messages of `cache_store.wire`, not here.
    """

    def __init__(self, mapping: mmap.mmap, slots: int, slot_bytes: int, fd: int = -1) -> None:
        """Use `create` or `attach`."""
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.fd = fd
        """What the other side attaches; -1 where this is the other side."""
        self._mapping = mapping
        self._slot_type = ctypes.c_ubyte * slot_bytes

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> StagingArea:
        """`slot_bytes` is rounded up to whole pages. Memory is taken as slots are first written."""
        if not 1 <= slots <= MAX_SLOTS or slot_bytes < 1:
            raise ValueError(
                f"{slots} slots of {slot_bytes} bytes; needed: 1 to {MAX_SLOTS} of at least 1 byte"
            )
        slot_bytes = rounded(slot_bytes)
        fd = os.memfd_create("manta-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, slots * slot_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls(mmap.mmap(fd, slots * slot_bytes), slots, slot_bytes, fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, slots: int, slot_bytes: int) -> StagingArea:
        """Map what the other side created. Takes over `fd`, also when it raises StagingError.

        The memory must be sealed against shrinking: otherwise its creator could make any access here a SIGBUS.
        """
        try:
            if not 1 <= slots <= MAX_SLOTS or slot_bytes < 1:
                raise StagingError(f"a staging area of {slots} slots of {slot_bytes} bytes")
            seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
            if not seals & fcntl.F_SEAL_SHRINK:
                raise StagingError("the staging area's memory is not sealed against shrinking")
            if size != slots * slot_bytes:
                raise StagingError(
                    f"the staging area has {size} bytes; {slots} slots of {slot_bytes} are {slots * slot_bytes}"
                )
            return cls(mmap.mmap(fd, size), slots, slot_bytes)
        except OSError as error:
            raise StagingError(f"no shared memory that can be mapped and written: {error}") from error
        finally:
            os.close(fd)

    @property
    def buffer(self) -> memoryview:
        """All slots, writable. The mapping lives as long as any view of it."""
        return memoryview(self._mapping)

    def slot(self, index: int) -> memoryview:
        """Writable. Raises IndexError for a slot that is not there."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        return memoryview(self._mapping)[index * self.slot_bytes : (index + 1) * self.slot_bytes]

    def lend(self, index: int, nbytes: int | None = None) -> Loan:
        """A slot, or its first bytes read-only. Raises IndexError for a slot that is not there."""
        if not 0 <= index < self.slots:
            raise IndexError(f"slot {index} of {self.slots}")
        lent = self._slot_type.from_buffer(self._mapping, index * self.slot_bytes)
        view = memoryview(lent).cast("B")
        return Loan(weakref.ref(lent), view if nbytes is None else view[:nbytes].toreadonly())

    def close(self) -> None:
        """Unmap now, or with the last view where there still are some. Safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        with contextlib.suppress(BufferError):
            self._mapping.close()


class Loan:
    """A slot that somebody may use for a while, and of which it can be told whether he kept any view."""

    def __init__(self, lent: weakref.ref[ctypes.Array[ctypes.c_ubyte]], view: memoryview) -> None:
        """`view` is, but for its copies, the only reference to `lent`."""
        self.view = view
        self._lent = lent

    def end(self) -> bool:
        """`view` is of no use from now on. Whether no other view of the slot is left."""
        try:
            self.view.release()
        except BufferError:
            return False
        return self._lent() is None


def rounded(slot_bytes: int) -> int:
    """Bytes of a slot for payloads of `slot_bytes`: whole pages."""
    return -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
