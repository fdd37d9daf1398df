"""Which cluster `manta cache` speaks to, and with what key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from cluster import state
from cluster.admin import KEY, Admin, AdminError, admin_key
from cluster.config import ClusterConfig

TIMEOUT_S = 30.0
"""Longer than a router waits for its nodes, so that one that hangs is told of by name."""


class Target(NamedTuple):
    endpoint: str
    key: str
    """The admin key; empty for none."""

    def admin(self) -> Admin:
        return Admin(self.endpoint, self.key, TIMEOUT_S)


def find_target(endpoint: str | None, config: Path | None, name: str | None) -> Target:
    """What is said first counts: `endpoint`, then the cluster of `config`, then the one that was started from here.

    The admin key is the one of `config`, where that is given. Raises AdminError, ConfigError and StateError.
    """
    if config is not None:
        found = ClusterConfig.load(config)
        return Target((endpoint or found.endpoint).rstrip("/"), admin_key(str(config)))
    if endpoint is not None:
        return Target(endpoint.rstrip("/"), os.environ.get(KEY, ""))
    cluster = state.only(name)
    if cluster is None or not cluster.running:
        raise AdminError(
            "no cluster runs that was started from here; give --endpoint or --config for another"
        )
    return Target(cluster.endpoint.rstrip("/"), admin_key(cluster.config))
