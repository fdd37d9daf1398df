"""The address of this node that its parts listen on.

Needs Ray, and is imported by deployments alone.
"""

from __future__ import annotations

import ipaddress

import ray
from ray.serve._private import replica as serve_replica


def node_address() -> str:
    """The IP address that Ray knows this node by; 127.0.0.1 in a cluster of one machine."""
    return str(ray.util.get_node_ip_address())


def keep_serve_on_node() -> None:
    """On a node known by a loopback address, keep Serve's internal gRPC port of this process there.

    Serve opens one in every replica, on all interfaces and with no setting for it, and it takes Ray's own messages.
    Call it where the module of a deployment class is imported: Serve opens the port after that.
    """
    add_port = serve_replica.add_port_to_grpc_server

    def add_port_on_node(server: object, address: str) -> int:
        node = node_address()
        if ipaddress.ip_address(node).is_loopback:
            address = address.replace("[::]", f"[{node}]" if ":" in node else node)
        return int(add_port(server, address))

    serve_replica.add_port_to_grpc_server = add_port_on_node
