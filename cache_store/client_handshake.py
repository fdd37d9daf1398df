"""How an engine's connection to the cache actor begins: connect, register, hand over the staging area."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cache_store.events import ProtocolError
from cache_store.staging import StagingArea
from cache_store.wire import Answer, MessageReader, Register, Registered, encode

_READ_BYTES = 64 * 1024


class Connected(NamedTuple):
    socket: socket.socket
    """Registered and non-blocking."""
    reader: MessageReader[Answer]
    area: StagingArea | None
    """New for this connection; None where no slots were registered."""
    node: str


def connect(
    path: Path, register: Register, *, deadline: float, wake_fd: int, stop: Callable[[], bool]
) -> Connected:
    """Wait until the store has answered, up to `deadline` on the monotonic clock.

    Raises OSError or ProtocolError. `wake_fd` is an eventfd at which `stop` is asked whether to give up at once.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    area: StagingArea | None = None
    try:
        sock.connect(str(path))
        if register.slots:
            area = StagingArea.create(register.slots, register.slot_bytes)
        _send(sock, register, area)
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        poll.register(wake_fd, select.POLLIN)
        reader: MessageReader[Answer] = MessageReader(Answer)
        while True:
            wait_s = deadline - time.monotonic()
            if wait_s <= 0 or stop():
                raise TimeoutError("the store did not answer the registration")
            poll.poll(wait_s * 1000 + 1)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(wake_fd)
            registered = _read(sock, reader)
            if registered is not None:
                return Connected(sock, reader, area, registered.node)
    except BaseException:
        sock.close()
        if area is not None:
            area.close()
        raise


def _send(sock: socket.socket, register: Register, area: StagingArea | None) -> None:
    frame = encode(register)
    fds = [] if area is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [area.fd]))]
    if sock.sendmsg([frame], fds, socket.MSG_NOSIGNAL) < len(frame):
        raise BlockingIOError("the socket takes no registration")


def _read(sock: socket.socket, reader: MessageReader[Answer]) -> Registered | None:
    """None when it has not come yet."""
    try:
        data = sock.recv(_READ_BYTES)
    except (BlockingIOError, InterruptedError):
        return None
    if not data:
        raise ConnectionError("the store refused the registration")
    answers = list(reader.feed(data))
    if not answers:
        return None
    if len(answers) > 1 or not isinstance(answers[0], Registered):
        raise ProtocolError(f"{type(answers[-1]).__name__} before anything was asked")
    return answers[0]
