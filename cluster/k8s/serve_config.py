"""serveConfigV2 of a RayService: the application in it, as the configuration that it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import yaml

from cluster.config import ClusterConfig, ConfigError
from cluster.k8s.workloads import items, mapping
from router.config import LimitsConfig

ROUTER_DEPLOYMENT = "router"
SHUTDOWN_S = 30
"""What Serve adds to a pool's drain_timeout_s before it ends a replica."""
_IMPORT_PATH = "cluster.app:build"


class Served(NamedTuple):
    """An application of serveConfigV2."""

    config: ClusterConfig
    deployments: dict[str, dict[str, Any]]

    @property
    def longest_s(self) -> float:
        """How long Serve waits for open requests of a replica that it stops."""
        return max(
            *(pool.drain_timeout_s + SHUTDOWN_S for pool in self.config.pools),
            *(number(item.get("graceful_shutdown_timeout_s"), 0) for item in self.deployments.values()),
        )

    @property
    def user_config(self) -> dict[str, Any]:
        """Of the routers."""
        return mapping(self.deployments.get(ROUTER_DEPLOYMENT, {}).get("user_config"))

    @property
    def limits(self) -> LimitsConfig:
        """Of the routers, as they are while this is deployed. Raises ConfigError."""
        router = {"limits": self.config.router.limits.model_dump() | mapping(self.user_config.get("limits"))}
        return ClusterConfig.parse(
            {"engine": {"kind": "sim"}, "router": router}, f"serveConfigV2: {ROUTER_DEPLOYMENT}: user_config"
        ).router.limits


def read_serve_config(text: Any) -> tuple[dict[str, Any], Served]:
    """The whole and its one application. Raises ConfigError."""
    try:
        data = yaml.safe_load(text) if isinstance(text, str) else None
    except yaml.YAMLError as error:
        raise ConfigError(f"serveConfigV2 is not valid YAML: {error}") from error
    applications = items(mapping(data).get("applications"))
    if len(applications) != 1:
        raise ConfigError(f"serveConfigV2 has {len(applications)} applications; needed: one")
    application = applications[0]
    if application.get("import_path") != _IMPORT_PATH:
        raise ConfigError(
            f"serveConfigV2: import_path is {application.get('import_path')!r}; needed: {_IMPORT_PATH}"
        )
    config = ClusterConfig.parse(application.get("args", {}), "serveConfigV2: args")
    deployments = items(application.get("deployments"))
    return mapping(data), Served(config, {str(item.get("name")): item for item in deployments})


def keys_of(config: ClusterConfig, user_config: Mapping[str, Any] | None = None) -> list[str]:
    """Keys of tenants and of the admin, as they are written: `env:NAME`, or the key itself."""
    router = config.router
    keys = [*(key for tenant in router.tenants.values() for key in tenant.api_keys), router.admin_key]
    for tenant in mapping(mapping(user_config).get("tenants")).values():
        keys += [str(key) for key in mapping(tenant).get("api_keys", [])]
    keys.append(str(mapping(user_config).get("admin_key", "")))
    return [key for key in keys if key]


def number(value: Any, otherwise: float) -> float:
    """`value`, or the other where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return otherwise
