"""The cache actor's side of one engine's connection."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from cache_store.chunk import ChunkError, check_header
from cache_store.engine_store import Store
from cache_store.events import KEY_BYTES, ChunkKey, ProtocolError
from cache_store.staging import MAX_SLOTS, Loan, StagingArea, StagingError
from cache_store.wire import (
    MAX_OPEN_REQUESTS,
    WIRE_VERSION,
    Answer,
    Corrupt,
    Found,
    Load,
    Loaded,
    Lookup,
    MessageReader,
    Register,
    Registered,
    Release,
    Request,
    Save,
    Saved,
    encode,
)

_READ_BYTES = 256 * 1024
_MAX_UNSENT_BYTES = 1024 * 1024
_MAX_LEASES = 65_536


class SocketCounters(msgspec.Struct):
    """Totals since the server's start."""

    accepted: int = 0
    foreign: int = 0
    """Connections of other users."""
    crowded: int = 0
    """Connections over the limit."""
    protocol_errors: int = 0
    """Connections that ended because of what the engine sent, or because it did not register or read."""
    store_errors: int = 0
    """Requests for which the store raised; answered as a miss or a dropped save."""
    slots_held: int = 0
    """Times that the store still had a view of a slot after its answer; such a connection ends."""


class Connection:
    """Reads requests, asks the store, sends answers. Belongs to one event loop; ends by itself or by `end`."""

    def __init__(
        self,
        sock: socket.socket,
        store: Store,
        *,
        node: str,
        counters: SocketCounters,
        register_timeout_s: float,
        max_staging_bytes: int,
        warn: Callable[[str, BaseException | None], None],
        on_end: Callable[[Connection], None],
    ) -> None:
        """`warn` is told what an engine or the store did wrong; `on_end` is called once."""
        self.requests: set[asyncio.Task[None]] = set()
        """Loads and saves that the store works on. They end after the connection, each with its own view of the
        staging area, whose mapping therefore lives until the last of them has ended."""
        self._sock = sock
        self._store = store
        self._node = node
        self._counters = counters
        self._max_staging_bytes = max_staging_bytes
        self._warn = warn
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._reader: MessageReader[Request] = MessageReader(Request)
        self._register: Register | None = None
        self._area: StagingArea | None = None
        self._fds: list[int] = []
        self._open: dict[int, int] = {}
        """Slot by id of an open request."""
        self._leases: dict[int, None] = {}
        self._unsent = bytearray()
        self._writing = False
        """The loop tells when the socket takes more."""
        self._ended = False
        self._register_timer = self._loop.call_later(
            register_timeout_s, self._refuse, f"no registration within {register_timeout_s:g} s"
        )
        self._loop.add_reader(sock, self._on_readable)

    @property
    def staging_bytes(self) -> int:
        return 0 if self._area is None else self._area.slots * self._area.slot_bytes

    @property
    def _engine(self) -> str:
        return "an engine" if self._register is None else f"engine {self._register.engine!r}"

    def end(self) -> None:
        """Close the connection and drop its leases. Safe to call twice."""
        if self._ended:
            return
        self._ended = True
        self._register_timer.cancel()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        with contextlib.suppress(OSError):
            # A child process that was forked meanwhile may have the socket open too.
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._close_fds()
        if self._area is not None:
            self._area.close()
        for lease in self._leases:
            self._release(lease)
        self._leases.clear()
        self._on_end(self)

    def check_integrity(self) -> None:
        """Raises AssertionError when the structure contradicts itself."""
        assert len(set(self._open.values())) == len(self._open), "two requests use one slot"
        assert len(self._open) <= MAX_OPEN_REQUESTS
        assert self._ended or len(self._open) <= len(self.requests)
        assert not self._ended or not self._leases
        assert self._register is None or not self._fds

    def _refuse(self, reason: str) -> None:
        if not self._ended:
            self._counters.protocol_errors += 1
            self._warn(f"closing the connection of {self._engine}: {reason}", None)
            self.end()

    def _on_readable(self) -> None:
        try:
            data = self._receive()
            if not data:
                self.end()
                return
            for message in self._reader.feed(data):
                self._take(message)
                if self._ended:
                    return
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.end()
        except ProtocolError as error:
            self._refuse(str(error))

    def _receive(self) -> bytes:
        """Descriptors are taken until there is a registration; the kernel drops those that come later."""
        if self._register is not None:
            return self._sock.recv(_READ_BYTES)
        fds = array.array("i")
        data, ancillary, flags, _ = self._sock.recvmsg(
            _READ_BYTES, socket.CMSG_SPACE(fds.itemsize), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        self._fds += fds
        if flags & socket.MSG_CTRUNC or len(self._fds) > 1:
            raise ProtocolError("more than one file descriptor")
        return data

    def _close_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _take(self, message: Request) -> None:
        if isinstance(message, Register):
            self._on_register(message)
            return
        if self._register is None:
            raise ProtocolError(f"{type(message).__name__} before Register")
        if isinstance(message, Load):
            self._on_load(message, self._register)
        elif isinstance(message, Save):
            self._on_save(message, self._register)
        elif isinstance(message, Lookup):
            self._on_lookup(message)
        elif isinstance(message, Release):
            if message.lease in self._leases:
                del self._leases[message.lease]
                self._release(message.lease)
        elif isinstance(message, Corrupt):
            try:
                self._store.corrupt(ChunkKey(message.key), message.tier)
            except Exception as error:
                self._on_store_error(error)

    def _on_register(self, register: Register) -> None:
        if self._register is not None:
            raise ProtocolError("a second Register")
        if register.version != WIRE_VERSION:
            raise ProtocolError(f"an engine of wire version {register.version}; needed: {WIRE_VERSION}")
        if register.rank >= register.world_size:
            raise ProtocolError(f"rank {register.rank} of {register.world_size}")
        if bool(register.slots) != bool(self._fds) or (register.slots and register.rank < 0):
            raise ProtocolError(
                f"{len(self._fds)} file descriptors with {register.slots} slots from rank {register.rank}"
            )
        if register.slots:
            self._area = self._attach(register)
        self._register = register
        self._register_timer.cancel()
        self._send(Registered(self._node))

    def _attach(self, register: Register) -> StagingArea:
        nbytes = register.slots * register.slot_bytes
        if register.slots > MAX_SLOTS or nbytes > self._max_staging_bytes:
            raise ProtocolError(
                f"a staging area of {register.slots} slots and {nbytes} bytes; "
                f"the limits are {MAX_SLOTS} and {self._max_staging_bytes}"
            )
        try:
            return StagingArea.attach(self._fds.pop(), register.slots, register.slot_bytes)
        except StagingError as error:
            raise ProtocolError(str(error)) from error

    def _on_lookup(self, lookup: Lookup) -> None:
        if len(lookup.keys) % KEY_BYTES:
            raise ProtocolError(f"{len(lookup.keys)} bytes of chunk keys")
        if lookup.id in self._open:
            raise ProtocolError(f"request {lookup.id} is open")
        try:
            found = self._store.lookup(lookup)
        except Exception as error:
            self._on_store_error(error)
            found = Found(lookup.id, bytes(len(lookup.keys) // KEY_BYTES), 0, 0)
        if found.lease:
            self._leases[found.lease] = None
            if len(self._leases) > _MAX_LEASES:
                oldest = next(iter(self._leases))
                del self._leases[oldest]
                self._release(oldest)
        self._send(found)

    def _on_load(self, load: Load, register: Register) -> None:
        area = self._open_slot(load.id, load.slot)
        self._begin(self._load(load, register.rank, area.lend(load.slot)))

    def _on_save(self, save: Save, register: Register) -> None:
        header = save.header
        area = self._open_slot(save.id, save.slot)
        if not 0 <= header.nbytes <= area.slot_bytes:
            raise ProtocolError(f"a payload of {header.nbytes} bytes in a slot of {area.slot_bytes}")
        fits = (header.identity, header.rank, header.world_size) == (
            register.identity,
            register.rank,
            register.world_size,
        )
        self._begin(self._save(save, area.lend(save.slot, header.nbytes), fits))

    def _open_slot(self, request: int, slot: int) -> StagingArea:
        """Note the request as open. Raises ProtocolError for a slot that is not there or not free."""
        if self._area is None or slot >= self._area.slots:
            raise ProtocolError(f"slot {slot} of {self._area.slots if self._area else 0}")
        if request in self._open:
            raise ProtocolError(f"request {request} is open")
        if slot in self._open.values():
            raise ProtocolError(f"slot {slot} is in use by an open request")
        if len(self._open) >= MAX_OPEN_REQUESTS:
            raise ProtocolError(f"more than {MAX_OPEN_REQUESTS} open requests")
        self._open[request] = slot
        return self._area

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self.requests.add(task)
        task.add_done_callback(self.requests.discard)

    async def _load(self, load: Load, rank: int, loan: Loan) -> None:
        answer = Loaded(load.id, "missing")
        try:
            outcome, tier, header = await self._store.load_into(
                ChunkKey(load.key), rank, loan.view, load.limit_s
            )
            if outcome != "loaded":
                answer = Loaded(load.id, outcome)
            elif header is not None and header.nbytes <= len(loan.view):
                answer = Loaded(load.id, outcome, tier, header)
        except Exception as error:
            self._on_store_error(error)
        self._finish(answer, loan)

    async def _save(self, save: Save, loan: Loan, fits: bool) -> None:
        answer = Saved(save.id, "refused")
        try:
            check_header(save.header)
            if fits:
                answer = Saved(save.id, await self._store.save(save.header, loan.view))
        except ChunkError:
            pass
        except Exception as error:
            self._on_store_error(error)
            answer = Saved(save.id, "dropped")
        self._finish(answer, loan)

    def _finish(self, answer: Loaded | Saved, loan: Loan) -> None:
        """Take the slot back from the store, then give it to the engine with the answer."""
        if not loan.end():
            # What has a view may still write: the engine must never get this slot back.
            self._counters.slots_held += 1
            self._warn("the store still holds a slot whose request it has answered", None)
            self.end()
            return
        if not self._ended:
            del self._open[answer.id]
            self._send(answer)

    def _release(self, lease: int) -> None:
        try:
            self._store.release(lease)
        except Exception as error:
            self._on_store_error(error)

    def _on_store_error(self, error: Exception) -> None:
        self._counters.store_errors += 1
        self._warn("the store failed", error)

    def _send(self, answer: Answer) -> None:
        self._unsent += encode(answer)
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            self._refuse("it does not read its answers")
        elif not self._writing:
            self._flush()

    def _flush(self) -> None:
        try:
            sent = self._sock.send(self._unsent, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.end()
            return
        del self._unsent[:sent]
        if self._unsent and not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock, self._flush)
        elif self._writing and not self._unsent:
            self._writing = False
            self._loop.remove_writer(self._sock)
