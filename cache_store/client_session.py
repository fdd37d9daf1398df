"""The engine's side of one connection to the cache actor, with the staging area that belongs to it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec

from cache_store.events import KEY_BYTES, ProtocolError
from cache_store.staging import StagingArea
from cache_store.wire import (
    MAX_OPEN_REQUESTS,
    Answer,
    Corrupt,
    Found,
    Load,
    Loaded,
    Lookup,
    MessageReader,
    Release,
    Save,
    Saved,
    encode,
)

_READ_BYTES = 256 * 1024
_MAX_UNSENT_BYTES = 8 * 1024 * 1024


class StoreUnavailable(ConnectionError):
    """There is no connection to the store, or it ended, or too much waits for it: take it for a miss."""


class StoreTimeout(TimeoutError):
    """The store did not answer within the request's time limit: take it for a miss."""


class Slot:
    """A piece of the staging area that the caller has, from `take_slot` until `release`.

    One request at a time may name it, and until that is answered the caller must not touch the bytes. `release` is
    right at any time, on success or not: where the store may still write to the slot, nobody gets it before it can't.
    """

    __slots__ = ("_busy", "_released", "index", "session", "view")

    def __init__(self, session: Session, area: StagingArea, index: int) -> None:
        self.index = index
        self.view = area.slot(index)
        """Writable, `slot_bytes` long; of no use after `release`."""
        self.session = session
        self._busy = False
        self._released = False

    @property
    def area(self) -> StagingArea:
        return self.session.staging

    def release(self) -> None:
        """Safe to call twice."""
        self.session.put_back(self)


class _Open(NamedTuple):
    """A request without an answer."""

    request: Lookup | Load | Save
    future: Future[Any]
    deadline: float
    slot: Slot | None


class Session:
    """One connection from its registration to its end, and one generation of the staging area.

    A slot whose request was not answered may be written to by the store at any later time. So slots never outlive
    the session: when it ends with requests open, or gives up on an answer that does not come, its staging area is
    never used again, and the next session has another.

    Requests are made from any thread; `step` and `end` belong to the thread that reads.
    """

    def __init__(
        self,
        sock: socket.socket,
        reader: MessageReader[Answer],
        area: StagingArea | None,
        *,
        wake: Callable[[], None],
        patience_s: float,
        on_retired: Callable[[Session], None],
    ) -> None:
        """`sock` is registered and non-blocking. `wake` makes the reading thread call `step` again at once. An answer
        that is `patience_s` later than its limit ends the session. `on_retired` is called once, after the end, when
        the last slot has come back: from then on nobody here touches the area."""
        self.timeouts = 0
        self._sock = sock
        self._reader = reader
        self._area = area
        self._wake = wake
        self._patience_s = patience_s
        self._on_retired = on_retired
        self._lock = threading.Lock()
        self._free = list(range(area.slots))[::-1] if area is not None else []
        self._taken = 0
        self._open: dict[int, _Open] = {}
        self._late: dict[int, _Open] = {}
        """Open requests whose futures have failed by their time limit."""
        self._leases: dict[int, int] = {}
        """The store's lease by ours: ours are never used twice, also when the store restarts."""
        self._unsent = bytearray()
        self._wakes_at = 0.0
        """When the reading thread looks at time limits again."""
        self._end_reason = ""
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @property
    def staging(self) -> StagingArea:
        assert self._area is not None
        return self._area

    @property
    def free_slots(self) -> int:
        with self._lock:
            return len(self._free)

    @property
    def open_requests(self) -> int:
        with self._lock:
            return len(self._open) + len(self._late)

    def take_slot(self) -> Slot | None:
        """None when there is none. The slot that was used last comes first: its pages are warm."""
        with self._lock:
            if self._end_reason or not self._free or self._area is None:
                return None
            self._taken += 1
            return Slot(self, self._area, self._free.pop())

    def put_back(self, slot: Slot) -> None:
        with self._lock:
            if slot._released:
                return
            slot._released = True
            with contextlib.suppress(BufferError):
                slot.view.release()
            retired = not slot._busy and self._recycle(slot)
        if retired:
            self._on_retired(self)

    def _recycle(self, slot: Slot) -> bool:
        """Whether that retires the area."""
        self._taken -= 1
        if not self._end_reason:
            self._free.append(slot.index)
        return bool(self._end_reason) and not self._taken

    def ask(self, request: Lookup | Load | Save, limit_s: float, slot: Slot | None = None) -> Future[Any]:
        """Raises ValueError for a slot that the caller does not have or that another request uses."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        wake = False
        frame = encode(request)
        deadline = time.monotonic() + limit_s
        with self._lock:
            problem = self._end_reason
            if not problem and slot is not None and (slot._released or slot._busy):
                raise ValueError(f"slot {slot.index} is {'released' if slot._released else 'in use'}")
            if not problem and len(self._open) + len(self._late) >= MAX_OPEN_REQUESTS:
                problem = f"{MAX_OPEN_REQUESTS} requests are open"
            if not problem and not self._send(frame):
                problem = f"{_MAX_UNSENT_BYTES} bytes wait to be read by the store"
            if not problem:
                self._open[request.id] = _Open(request, future, deadline, slot)
                if slot is not None:
                    slot._busy = True
                wake = deadline < self._wakes_at
                self._wakes_at = min(deadline, self._wakes_at)
        if problem:
            future.set_exception(StoreUnavailable(problem))
        elif wake:
            self._wake()
        return future

    def tell(self, message: Release | Corrupt) -> None:
        """Without an answer, and lost where there is no connection: leases end with it."""
        with self._lock:
            if isinstance(message, Release):
                lease = self._leases.pop(message.lease, 0)
                if not lease:
                    return
                message = Release(lease)
            if not self._end_reason:
                self._send(encode(message))

    def _send(self, frame: bytes) -> bool:
        """False when too much waits already. A broken connection is noticed by the reading thread."""
        if self._unsent:
            if len(self._unsent) + len(frame) > _MAX_UNSENT_BYTES:
                return False
            self._unsent += frame
            return True
        try:
            sent = self._sock.send(frame, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            return True
        if sent < len(frame):
            self._unsent += frame[sent:]
            self._wake()
        return True

    def step(self, wake_fd: int) -> str:
        """Wait for answers, time limits or the eventfd, and see to them. Says why the session is over, once it is."""
        self._poll.register(wake_fd, select.POLLIN)
        with self._lock:
            self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            now = time.monotonic()
            if self._wakes_at <= now:
                self._wakes_at = self._next_deadline()
            wait_s = min(self._wakes_at - now, 3600.0)
        events = dict(self._poll.poll(max(0.0, wait_s) * 1000 + 1))
        if wake_fd in events:
            os.eventfd_read(wake_fd)
        happened = events.get(self._sock.fileno(), 0)
        reason = ""
        if happened & select.POLLOUT:
            reason = self._flush()
        if happened & ~select.POLLOUT:
            reason = self._read()
        # Answers that have come are taken before limits are looked at: this process itself may have been stopped.
        return reason or self._expire()

    def _next_deadline(self) -> float:
        ends = [request.deadline for request in self._open.values()]
        ends += [request.deadline + self._patience_s for request in self._late.values()]
        return min(ends, default=float("inf"))

    def _flush(self) -> str:
        with self._lock:
            try:
                sent = self._sock.send(self._unsent, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return ""
            except OSError as error:
                return f"the connection broke: {error}"
            del self._unsent[:sent]
            return ""

    def _read(self) -> str:
        try:
            data = self._sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return ""
        except OSError as error:
            return f"the connection broke: {error}"
        if not data:
            return "the store closed the connection"
        try:
            for answer in self._reader.feed(data):
                self._take(answer)
        except ProtocolError as error:
            return f"the store sent what it must not: {error}"
        return ""

    def _take(self, answer: Answer) -> None:
        """Raises ProtocolError for an answer that does not belong to an open request."""
        if not isinstance(answer, Found | Loaded | Saved):
            raise ProtocolError(type(answer).__name__)
        with self._lock:
            asked = self._open.get(answer.id) or self._late.get(answer.id)
            if asked is None:
                raise ProtocolError(f"an answer to request {answer.id}, which is not open")
            _check_answer(asked, answer)
            late = self._open.pop(answer.id, None) is None
            self._late.pop(answer.id, None)
            if asked.slot is not None:
                asked.slot._busy = False
                if asked.slot._released:
                    self._recycle(asked.slot)
            if isinstance(answer, Found) and answer.lease:
                if late:
                    self._send(encode(Release(answer.lease)))
                else:
                    self._leases[answer.id] = answer.lease
                    answer = msgspec.structs.replace(answer, lease=answer.id)
        if not late:
            asked.future.set_result(answer)

    def _expire(self) -> str:
        """Fails futures whose limit has passed. Says so when the store is not to be waited for any more."""
        now = time.monotonic()
        if now < self._wakes_at:
            return ""
        with self._lock:
            expired = [request for request in self._open.values() if request.deadline <= now]
            for request in expired:
                self._late[request.request.id] = self._open.pop(request.request.id)
            self.timeouts += len(expired)
            given_up = any(late.deadline + self._patience_s <= now for late in self._late.values())
        for request in expired:
            request.future.set_exception(StoreTimeout("the store did not answer in time"))
        return "the store did not answer" if given_up else ""

    def end(self, reason: str) -> None:
        """Close the connection and fail what is open. Safe to call twice."""
        with self._lock:
            if self._end_reason:
                return
            self._end_reason = reason
            failed = list(self._open.values())
            for request in (*failed, *self._late.values()):
                if request.slot is not None:
                    request.slot._busy = False
                    self._taken -= request.slot._released
            self._open.clear()
            self._late.clear()
            self._leases.clear()
            self._free.clear()
            retired = not self._taken
            with contextlib.suppress(OSError):
                # A child process that was forked meanwhile may have the socket open too.
                self._sock.shutdown(socket.SHUT_RDWR)
            self._sock.close()
        for request in failed:
            request.future.set_exception(StoreUnavailable(reason))
        if retired:
            self._on_retired(self)

    def forget(self) -> None:
        """In a child process after a fork, where only the one thread that forked goes on: drop what was inherited."""
        self._lock = threading.Lock()
        self._end_reason = "the connection belongs to another process"
        self._sock.close()
        self._on_retired = lambda session: None

    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself."""
        with self._lock:
            slots = self._area.slots if self._area is not None else 0
            assert len(set(self._free)) == len(self._free)
            assert self._taken >= 0
            assert self._end_reason or len(self._free) + self._taken == slots, "a slot was lost"
            used = [r.slot for r in (*self._open.values(), *self._late.values()) if r.slot is not None]
            assert all(slot._busy and slot.index not in self._free for slot in used)
            assert len({slot.index for slot in used}) == len(used)
            assert not (self._end_reason and (used or self._leases or self._free))


def _check_answer(asked: _Open, answer: Found | Loaded | Saved) -> None:
    request = asked.request
    if isinstance(answer, Found):
        fits = isinstance(request, Lookup) and len(answer.tiers) * KEY_BYTES == len(request.keys)
    elif isinstance(answer, Loaded):
        fits = isinstance(request, Load) and (answer.outcome == "loaded") == (answer.header is not None)
        if answer.header is not None and asked.slot is not None:
            fits = fits and 0 <= answer.header.nbytes <= asked.slot.area.slot_bytes
    else:
        fits = isinstance(request, Save)
    if not fits:
        raise ProtocolError(f"{type(answer).__name__} does not answer {type(request).__name__} {answer.id}")
