"""Ports for servers whose number is decided before they listen."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection

PORTS = range(20_000, 32_000)
"""Below those that systems give to outgoing connections, so that none of these takes one before it is used, or while
its server restarts."""


def free_ports(count: int, host: str = "", besides: Collection[int] = ()) -> list[int]:
    """Distinct ports of `host` (empty: of all addresses), none of `besides`, that nothing listens on at this moment.

    In random order, so that two processes that ask at the same moment hardly get the same. Raises OSError where there
    are not so many.
    """
    found: list[int] = []
    candidates = list(PORTS)
    random.SystemRandom().shuffle(candidates)
    for port in candidates:
        if len(found) == count:
            break
        if port not in besides and _is_free(host, port):
            found.append(port)
    if len(found) < count:
        raise OSError(
            f"found {len(found)} free ports from {PORTS.start} to {PORTS.stop - 1}; needed: {count}"
        )
    return found


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
