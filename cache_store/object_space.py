"""Where the payloads of a node's `dram` tier live."""

from __future__ import annotations

from typing import Protocol


class ObjectGone(LookupError):
    """The object that a ref names does not exist any more, or its node can't be reached."""


class Held(Protocol):
    """A payload in an object space, from `put` or `pull` until `free`."""

    @property
    def nbytes(self) -> int: ...

    @property
    def view(self) -> memoryview:
        """The bytes, read-only, format B, without a copy. No view of it may be left when `free` is called."""
        ...

    @property
    def ref(self) -> object:
        """What another node's space can `pull`. Whoever has it may keep the bytes alive after `free`."""
        ...

    def free(self) -> None:
        """Give the bytes back. Once."""
        ...


class ObjectSpace(Protocol):
    """Immutable payloads in memory. `put` and `pull` block for as long as the copy takes and are called from
    threads, several at once; everything else belongs to the store's loop."""

    def put(self, payload: memoryview) -> Held:
        """A copy of `payload` (format B, contiguous). Raises MemoryError when there is no room."""
        ...

    def pull(self, ref: object, timeout_s: float) -> Held:
        """A local copy of another space's object, to be freed by the caller.

        Raises TimeoutError, or ObjectGone when the object or its owner no longer exists.
        """
        ...

    def lingering(self) -> int:
        """Bytes of objects that were freed here but that borrowers elsewhere still keep in this node's memory."""
        ...


class HeapSpace:
    """Payloads in this process's heap; refs are the objects themselves, so spaces of one process can pull.

    What is freed is overwritten first: a reader that is too late gets other bytes.
    """

    def put(self, payload: memoryview) -> HeapHeld:
        return HeapHeld(payload)

    def pull(self, ref: object, timeout_s: float) -> HeapHeld:
        if not isinstance(ref, HeapHeld) or ref.freed:
            raise ObjectGone("the object was freed")
        return HeapHeld(ref.view)

    def lingering(self) -> int:
        return 0


class HeapHeld:
    """See `Held`."""

    def __init__(self, payload: memoryview) -> None:
        self._bytes = bytearray(payload)
        self.nbytes = len(self._bytes)
        self.view = memoryview(self._bytes).toreadonly()
        self.freed = False

    @property
    def ref(self) -> object:
        return self

    def free(self) -> None:
        """Raises BufferError while somebody still reads, and ValueError the second time."""
        if self.freed:
            raise ValueError("freed twice")
        self.view.release()
        self._bytes[:] = bytes(self.nbytes)
        self.freed = True
