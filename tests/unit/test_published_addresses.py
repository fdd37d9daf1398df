"""What counts as an address that a cluster has published, and which of them are of no use on another host."""

from __future__ import annotations

from tests.published_addresses import on_this_machine_only, published_addresses

ADMIN = {
    "ready": True,
    "endpoint": "http://10.1.0.2:8000/law",
    "routers": [{"id": "x9k2", "node": "ab" * 28, "address": "10.1.0.2", "state": "RUNNING", "pid": 71}],
    "replicas": [
        {"id": "unified-abc.0", "node": "cd" * 28, "address": "10.1.0.3:4001", "kv_used": 0.5, "role": "unified"},
        {"id": "unified-abd", "address": "[fd00::3]:4001", "nixl": {"side_channel": "node-3.lab:5600"}},
    ],
    "queued": 0,
}  # fmt: skip


def test_addresses_are_found_wherever_they_stand_and_nothing_else_is() -> None:
    assert published_addresses(ADMIN) == [
        "http://10.1.0.2:8000/law",
        "10.1.0.2",
        "10.1.0.3:4001",
        "[fd00::3]:4001",
        "node-3.lab:5600",
    ]


def test_addresses_of_a_node_lead_there_from_everywhere() -> None:
    assert on_this_machine_only(published_addresses(ADMIN)) == []


def test_addresses_of_one_machine_alone_are_told() -> None:
    alone = [
        "http://127.0.0.1:8000", "localhost:4001", "127.3.0.1", "[::1]:4001", "::1", "0.0.0.0:8000", "tcp://localhost/x",
    ]  # fmt: skip
    assert published_addresses({"all": alone}) == alone
    assert on_this_machine_only(alone) == alone
