"""An engine's client of the cache actor of its node. No Ray in it, and no asyncio."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec

from cache_store.chunk import Header
from cache_store.client_handshake import connect
from cache_store.client_session import Session, Slot, StoreTimeout, StoreUnavailable
from cache_store.events import KEY_BYTES, ProtocolError
from cache_store.staging import StagingArea, rounded
from cache_store.wire import (
    MAX_KEYS,
    MAX_SECONDS,
    Corrupt,
    Found,
    Load,
    Loaded,
    Lookup,
    Register,
    Release,
    Save,
    Saved,
    Source,
)

__all__ = ["ClientStats", "Slot", "StoreClient", "StoreTimeout", "StoreUnavailable"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_HANDSHAKE_S = 2.0

Prepare = Callable[[StagingArea], Callable[[], None]]


class ClientStats(msgspec.Struct, frozen=True):
    """A moment of a client."""

    alive: bool
    sessions: int
    """Connections made so far."""
    free_slots: int
    open_requests: int
    areas: int
    """Staging areas in memory: that of the connection, and those of ended ones of which slots were not released."""
    timeouts: int
    """Requests that were not answered in time."""


class StoreClient:
    """A connection to the store, made again by a thread of its own whenever it ends.

    No method waits, but for `wait_alive` and `close`: requests give futures, whose callbacks run in that thread and
    must not wait either. A future can't be cancelled. It ends with the answer, or with StoreTimeout at its time limit,
    or with StoreUnavailable as soon as there is no connection. Answers are from another process: the caller verifies
    what was loaded with `cache_store.chunk.verify`.

    Payloads cross in slots (`take_slot`), which belong to the connection of their time: a slot of an earlier one is
    StoreUnavailable. After a fork the child has no connection and gets none; it makes a client of its own.
    """

    def __init__(
        self,
        path: Path,
        register: Register,
        *,
        prepare: Prepare | None = None,
        patience_s: float = 1.0,
    ) -> None:
        """`register.slots` and `register.slot_bytes` say what staging area to make, for each connection another.

        `prepare` is called with each, in the client's thread and before any slot is given out, and gives what undoes
        it, called when nobody here uses the area any more. It is for page-locking. An answer that is `patience_s`
        later than its limit ends the connection.
        """
        slot_bytes = rounded(register.slot_bytes) if register.slots else 0
        self._path = path
        self._register = msgspec.structs.replace(register, slot_bytes=slot_bytes)
        self._prepare = prepare
        self._patience_s = patience_s
        self._ids = itertools.count(1)
        self._node = ""
        self._session: Session | None = None
        self._areas: dict[Session, tuple[StagingArea | None, Callable[[], None] | None]] = {}
        self._sessions = 0
        self._timeouts = 0
        self._closing = threading.Event()
        self._alive = threading.Condition()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake_fd).atexit = False
        self._thread = threading.Thread(target=self._run, name="manta-store-client", daemon=True)
        _clients.add(self)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._session is not None

    @property
    def node(self) -> str:
        """Id of the actor's node; empty before the first connection."""
        return self._node

    def wait_alive(self, timeout_s: float) -> bool:
        with self._alive:
            return self._alive.wait_for(lambda: self._session is not None, timeout_s)

    def take_slot(self) -> Slot | None:
        """None when all are taken or there is no connection."""
        session = self._session
        return session.take_slot() if session is not None else None

    def lookup(
        self,
        keys: bytes,
        world_size: int,
        sources: Sequence[Source] = (),
        *,
        limit_s: float = 1.0,
        lease_s: float = 60.0,
    ) -> Future[Found]:
        """Which of a prompt's chunks can be loaded? `keys` are concatenated. Give `Found.lease` to `release`, unless
        it is 0."""
        if len(keys) % KEY_BYTES or len(keys) > MAX_KEYS * KEY_BYTES:
            raise ValueError(f"{len(keys)} bytes of chunk keys; needed: {KEY_BYTES} each, {MAX_KEYS} at most")
        session = self._session
        if session is None:
            return _unavailable()
        request = Lookup(next(self._ids), keys, world_size, tuple(sources), _seconds(lease_s))
        return session.ask(request, limit_s)

    def load(self, key: bytes, slot: Slot, limit_s: float = 10.0) -> Future[Loaded]:
        """Put this rank's part into the slot. Raises ValueError for a slot that is released or in use."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"a chunk key of {len(key)} bytes; needed: {KEY_BYTES}")
        return slot.session.ask(Load(next(self._ids), key, slot.index, _seconds(limit_s)), limit_s, slot)

    def save(self, header: Header, slot: Slot, limit_s: float = 10.0) -> Future[Saved]:
        """Keep the first `header.nbytes` bytes of the slot. Raises ValueError for a slot that is released or in use,
        or too small."""
        if not 0 <= header.nbytes <= self._register.slot_bytes:
            raise ValueError(f"a payload of {header.nbytes} bytes; needed: 0 to {self._register.slot_bytes}")
        return slot.session.ask(Save(next(self._ids), header, slot.index), limit_s, slot)

    def release(self, lease: int) -> None:
        """A lease that ended with its connection is no error."""
        session = self._session
        if session is not None:
            session.tell(Release(lease))

    def corrupt(self, key: bytes, tier: int) -> None:
        """Tell the store that what it loaded is not what its header says."""
        session = self._session
        if session is not None:
            session.tell(Corrupt(key, tier))

    def stats(self) -> ClientStats:
        session = self._session
        return ClientStats(
            alive=session is not None,
            sessions=self._sessions,
            free_slots=session.free_slots if session is not None else 0,
            open_requests=session.open_requests if session is not None else 0,
            areas=sum(area is not None for area, _ in list(self._areas.values())),
            timeouts=self._timeouts + (session.timeouts if session is not None else 0),
        )

    def close(self, timeout_s: float = 2.0) -> None:
        """Fail what is open and end the thread. Waits for it no longer than `timeout_s`. Safe to call twice."""
        self._closing.set()
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def check_integrity(self) -> None:
        """Raises AssertionError when the structures contradict themselves or each other."""
        for session in list(self._areas):
            session.check_integrity()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        pause_s, reason = _FIRST_PAUSE_S, ""
        while not self._closing.is_set():
            started = time.monotonic()
            try:
                session = self._connect(started + _HANDSHAKE_S)
            except (OSError, ProtocolError) as error:
                if reason != str(error):
                    reason = str(error)
                    logger.info("no store at %s: %s", self._path, reason)
            else:
                reason = self._serve(session)
                if not self._closing.is_set():
                    logger.warning("connection to the store at %s ended: %s", self._path, reason)
            steady = time.monotonic() - started > 2 * _LONGEST_PAUSE_S
            pause_s = _FIRST_PAUSE_S if steady else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._closing.wait(pause_s)

    def _serve(self, session: Session) -> str:
        """Until the session is over. Says why."""
        with self._alive:
            self._session = session
            self._sessions += 1
            self._alive.notify_all()
        reason = ""
        try:
            while not reason:
                reason = session.step(self._wake_fd)
                if self._closing.is_set():
                    reason = "the client was closed"
        finally:
            self._session = None
            self._timeouts += session.timeouts
            session.end(reason or "the client failed")
        return reason

    def _connect(self, deadline: float) -> Session:
        """Raises OSError or ProtocolError."""
        sock, reader, area, self._node = connect(
            self._path, self._register, deadline=deadline, wake_fd=self._wake_fd, stop=self._closing.is_set
        )
        undo = None
        if area is not None and self._prepare is not None:
            try:
                undo = self._prepare(area)
            except Exception:
                logger.warning("the staging area is used as it is", exc_info=True)
        session = Session(
            sock, reader, area, wake=self._wake, patience_s=self._patience_s, on_retired=self._on_retired
        )
        self._areas[session] = (area, undo)
        return session

    def _on_retired(self, session: Session) -> None:
        area, undo = self._areas.pop(session)
        if undo is not None:
            try:
                undo()
            except Exception:
                logger.warning("a staging area was left as it is", exc_info=True)
        if area is not None:
            area.close()

    def _forget(self) -> None:
        """In a child process after a fork."""
        for session in list(self._areas):
            session.forget()
        self._session = None
        self._closing.set()


def _seconds(limit_s: float) -> float:
    if not 0 < limit_s <= MAX_SECONDS:
        raise ValueError(f"{limit_s} seconds; needed: more than 0 and at most {MAX_SECONDS:g}")
    return float(limit_s)


def _unavailable() -> Future[Found]:
    future: Future[Found] = Future()
    future.set_exception(StoreUnavailable("there is no connection to the store"))
    return future


_clients: weakref.WeakSet[StoreClient] = weakref.WeakSet()


def _forget_in_child() -> None:
    for client in list(_clients):
        client._forget()


os.register_at_fork(after_in_child=_forget_in_child)
