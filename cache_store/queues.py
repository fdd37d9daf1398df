"""Queues of chunk keys in one table, compact enough for millions of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from cache_store.events import ChunkKey

MAX_QUEUES = 255


class Queues:
    """Keys with their sizes, each in one of several queues, oldest first.

    Links are slot numbers in arrays: 21 bytes a key beside its place in the dictionary, where objects would take
    over a hundred. Queue number q is also a slot, the one before its oldest key and behind its newest: walking a
    queue starts at q, goes on with `newer` and is at its end when it is at q again.

    Slot numbers are dense and used again, so that a policy can keep columns of its own beside these.
    """

    def __init__(self, queues: int) -> None:
        assert 1 <= queues <= MAX_QUEUES, queues
        # The last queue holds the free slots.
        ends = range(queues + 1)
        self._free = queues
        self._newer = array("I", ends)
        self._older = array("I", ends)
        self._nbytes = array("Q", [0] * len(ends))
        self._queue = bytearray(ends)
        self._keys: list[ChunkKey | None] = [None] * len(ends)
        self._slots: dict[ChunkKey, int] = {}
        self._used = [0] * queues

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._slots

    def slot(self, key: ChunkKey) -> int:
        """Raises KeyError for a key that is in no queue."""
        return self._slots[key]

    def key(self, slot: int) -> ChunkKey:
        key = self._keys[slot]
        assert key is not None, f"slot {slot} is free"
        return key

    def nbytes(self, slot: int) -> int:
        return self._nbytes[slot]

    def queue(self, slot: int) -> int:
        return self._queue[slot]

    def newer(self, slot: int) -> int:
        """The slot behind this one in its queue; the queue's number behind the newest, the oldest behind that."""
        return self._newer[slot]

    def used(self, queue: int) -> int:
        """Bytes of a queue's keys."""
        return self._used[queue]

    def walk(self, queue: int) -> Iterator[int]:
        """Slots of a queue, oldest first. The queue must not change meanwhile."""
        slot = self._newer[queue]
        while slot != queue:
            yield slot
            slot = self._newer[slot]

    def insert(self, key: ChunkKey, nbytes: int, queue: int) -> int:
        """Slot of a key that was in no queue, now the newest of this one."""
        assert key not in self._slots
        slot = self._newer[self._free]
        if slot == self._free:
            slot = self._new_slot()
        self._keys[slot] = key
        self._slots[key] = slot
        self._nbytes[slot] = nbytes
        self._unlink(slot)
        self._link(slot, queue)
        self._used[queue] += nbytes
        return slot

    def move(self, slot: int, queue: int) -> None:
        """Make a key the newest of a queue, of its own or of another."""
        self._used[self._queue[slot]] -= self._nbytes[slot]
        self._used[queue] += self._nbytes[slot]
        self._unlink(slot)
        self._link(slot, queue)

    def resize(self, slot: int, nbytes: int) -> None:
        self._used[self._queue[slot]] += nbytes - self._nbytes[slot]
        self._nbytes[slot] = nbytes

    def remove(self, slot: int) -> None:
        del self._slots[self.key(slot)]
        self._keys[slot] = None
        self._used[self._queue[slot]] -= self._nbytes[slot]
        self._nbytes[slot] = 0
        self._unlink(slot)
        self._link(slot, self._free)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every key is in exactly one queue and the sums are right."""
        seen = 0
        for queue, used in enumerate(self._used):
            slots = list(self.walk(queue))
            assert used == sum(self._nbytes[slot] for slot in slots), f"bytes of queue {queue}"
            assert all(self._queue[slot] == queue for slot in slots), f"a slot of another queue in {queue}"
            assert all(self._slots[self.key(slot)] == slot for slot in slots), f"keys of queue {queue}"
            seen += len(slots)
        free = list(self.walk(self._free))
        assert all(self._keys[slot] is None and self._queue[slot] == self._free for slot in free)
        assert seen == len(self._slots), "keys in no queue, or in two"
        assert seen + len(free) + len(self._used) + 1 == len(self._keys), "slots in no queue"
        assert all(self._older[newer] == slot for slot, newer in enumerate(self._newer)), "links"

    def _new_slot(self) -> int:
        """A slot in a ring of its own."""
        slot = len(self._keys)
        self._newer.append(slot)
        self._older.append(slot)
        self._nbytes.append(0)
        self._queue.append(self._free)
        self._keys.append(None)
        return slot

    def _unlink(self, slot: int) -> None:
        newer, older = self._newer[slot], self._older[slot]
        self._newer[older] = newer
        self._older[newer] = older

    def _link(self, slot: int, queue: int) -> None:
        newest = self._older[queue]
        self._newer[newest] = slot
        self._older[slot] = newest
        self._newer[slot] = queue
        self._older[queue] = slot
        self._queue[slot] = queue
