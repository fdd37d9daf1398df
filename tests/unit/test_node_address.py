"""What a node's parts bind to and tell others: its own address, and loopback only where that is its address."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ray
from ray.serve._private import replica as serve_replica

from cache_store.node_address import keep_serve_on_node, node_address
from router.deployment import endpoint_on
from tests.integration.in_process import AppServer, bound_socket

Asked = list[str]


@pytest.fixture
def known_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Asked]:
    """Make Ray know this node by an address, and Serve's internal port go to a list instead of a socket."""

    def known(address: str) -> Asked:
        asked: Asked = []

        def add_port(server: object, where: str) -> int:
            asked.append(where)
            return 4321

        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
        monkeypatch.setattr(serve_replica, "add_port_to_grpc_server", add_port)
        return asked

    return known


def test_a_node_is_told_by_the_address_that_ray_knows_it_by(known_as: Callable[[str], Asked]) -> None:
    known_as("10.1.0.3")
    assert node_address() == "10.1.0.3"


@pytest.mark.parametrize(("node", "bound"), [("127.0.0.1", "127.0.0.1:0"), ("::1", "[::1]:0")])
def test_on_a_loopback_node_serves_internal_port_stays_there(
    known_as: Callable[[str], Asked], node: str, bound: str
) -> None:
    asked = known_as(node)
    keep_serve_on_node()
    assert serve_replica.add_port_to_grpc_server(object(), "[::]:0") == 4321
    assert asked == [bound]


@pytest.mark.parametrize("node", ["10.1.0.3", "192.168.7.1", "fd00::3"])
def test_on_a_node_that_others_reach_serves_internal_port_is_left_alone(
    known_as: Callable[[str], Asked], node: str
) -> None:
    asked = known_as(node)
    keep_serve_on_node()
    serve_replica.add_port_to_grpc_server(object(), "[::]:0")
    assert asked == ["[::]:0"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9"])
async def test_a_server_tells_the_address_that_it_is_bound_to(host: str) -> None:
    async def app(*_: object) -> None:
        raise AssertionError("not asked")

    server = AppServer([app], [bound_socket(host)])
    await server.start()
    try:
        assert server.addresses[0].rpartition(":")[0] == host
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("configured", "node", "published"),
    [
        ("http://*:8000", "10.1.0.2", "http://10.1.0.2:8000"),
        ("http://*:8000/law", "fd00::2", "http://[fd00::2]:8000/law"),
        ("http://*:8000", "127.0.0.1", "http://127.0.0.1:8000"),
        ("http://10.9.9.9:8000", "10.1.0.2", "http://10.9.9.9:8000"),
    ],
)
def test_an_endpoint_at_every_address_is_published_at_the_nodes_own(
    configured: str, node: str, published: str
) -> None:
    assert endpoint_on(configured, node) == published
