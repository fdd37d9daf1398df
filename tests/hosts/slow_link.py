"""A link with delay, loss and a bandwidth, for kernels whose tc has no netem.

    python slow_link.py DEVICE DEVICE DELAY_S LOSS BITS_PER_S READY_FILE

Carries frames between two interfaces of the network it runs in, until it is killed. It needs no package.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_ADD_MEMBERSHIP = 1
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
PACKET_MR_PROMISC = 1
SO_RCVBUFFORCE = 33
BUFFER = 16 << 20
FRAME = 1 << 17
VNET_HEADER = 10
"""Bytes in front of a frame that say what the sender's kernel left for a network card to do: sums and cutting."""
QUEUED = 1000
"""Frames on their way; more are lost, as with netem."""


class SlowLink:
    """One direction. Frames leave in the order in which they came. Times are seconds of any one clock."""

    def __init__(self, delay_s: float, loss: float, bits_per_s: float, dice: random.Random) -> None:
        self._delay_s = delay_s
        self._loss = loss
        self._bits_per_s = bits_per_s
        self._dice = dice
        self._free_at = 0.0
        self._frames: deque[tuple[float, bytes]] = deque()

    def push(self, frame: bytes, bits: int, now: float) -> None:
        """A frame enters, or is lost."""
        if len(self._frames) >= QUEUED or self._dice.random() < self._loss:
            return
        self._free_at = max(now, self._free_at)
        if self._bits_per_s:
            self._free_at += bits / self._bits_per_s
        self._frames.append((self._free_at + self._delay_s, frame))

    def pop(self, now: float) -> Iterator[bytes]:
        """The frames that have arrived by now."""
        while self._frames and self._frames[0][0] <= now:
            yield self._frames.popleft()[1]

    @property
    def next_at(self) -> float:
        """When the next frame arrives; infinity when none is on its way."""
        return self._frames[0][0] if self._frames else float("inf")


def carry(devices: tuple[str, str], links: tuple[SlowLink, SlowLink], ready: Path) -> None:
    """`links[i]` leads from `devices[i]` to the other one. Does not return."""
    sockets = tuple(_open(device) for device in devices)
    poll = select.epoll()
    for end in sockets:
        poll.register(end, select.EPOLLIN)
    ready.touch()
    while True:
        wait = min(link.next_at for link in links) - time.monotonic()
        poll.poll(-1 if wait == float("inf") else max(0.0, wait))
        for i, link in enumerate(links):
            for frame in _received(sockets[i]):
                link.push(frame, 8 * (len(frame) - VNET_HEADER), time.monotonic())
            for frame in link.pop(time.monotonic()):
                # An interface that is down loses what is sent to it.
                with suppress(OSError):
                    sockets[1 - i].send(frame)


def _open(device: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    end.bind((device, ETH_P_ALL))
    membership = socket.if_nametoindex(device).to_bytes(4, sys.byteorder) + PACKET_MR_PROMISC.to_bytes(
        2, sys.byteorder
    )
    end.setsockopt(SOL_PACKET, PACKET_ADD_MEMBERSHIP, membership + bytes(10))
    end.setblocking(False)
    return end


def _received(end: socket.socket) -> Iterator[bytes]:
    # The other errors say that the interface is down, once each time.
    with suppress(OSError):
        for _ in range(QUEUED):
            yield end.recv(FRAME)


def main() -> None:
    first, second, delay_s, loss, bits_per_s, ready = sys.argv[1:]
    dice = random.Random(first)
    links = tuple(SlowLink(float(delay_s), float(loss), float(bits_per_s), dice) for _ in range(2))
    carry((first, second), (links[0], links[1]), Path(ready))


if __name__ == "__main__":
    main()
