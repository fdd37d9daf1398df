"""What a configuration must not take from other applications on the same Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.config import ClusterConfig


def collisions(config: ClusterConfig, details: Mapping[str, Any]) -> list[str]:
    """`details` is what Serve's controller knows of itself. One line for each thing that is taken, or fixed otherwise.

    Serve listens at one address and port for all its applications, and keeps the first that it was told.
    """
    found = []
    for name, application in details.get("applications", {}).items():
        if name != config.name and application.get("route_prefix") == config.http.route_prefix:
            found.append(
                f"http.route_prefix: found {config.http.route_prefix}, which the application {name} has; needed: "
                f"another one, as /{config.name}"
            )
    http = details.get("http_options") or {}
    listens = (http.get("host"), http.get("port"))
    if None not in listens and listens != (config.http.host, config.http.port):
        found.append(
            f"http: found {config.http.host}:{config.http.port}, and this Ray's Serve listens at "
            f"{listens[0]}:{listens[1]} for all its applications; needed: the same, and an http.route_prefix of its own"
        )
    return found
