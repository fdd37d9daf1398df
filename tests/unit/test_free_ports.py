"""Ports that are given to servers are free ones."""

from __future__ import annotations

import socket

import pytest

from cache_store import free_ports as module
from cache_store.free_ports import PORTS, free_ports

HOST = "127.0.0.1"


def test_they_are_distinct_and_can_be_bound() -> None:
    found = free_ports(20, HOST)
    assert len(set(found)) == 20
    assert set(found) <= set(PORTS)
    for port in found:
        with socket.socket() as sock:
            sock.bind((HOST, port))


def test_those_that_are_taken_or_reserved_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, reserved, free = free_ports(3, HOST)
    monkeypatch.setattr(module, "PORTS", range(min(taken, reserved, free), max(taken, reserved, free) + 1))
    others = set(module.PORTS) - {taken, reserved, free}
    with socket.socket() as sock:
        sock.bind((HOST, taken))
        sock.listen()
        assert free_ports(1, HOST, besides={*others, reserved}) == [free]
        with pytest.raises(OSError, match=r"found 1 free ports .* needed: 2"):
            free_ports(2, HOST, besides={*others, reserved})
