"""A configuration deployed on the test session's Ray, and what tests do with it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import httpx
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.config import ClusterConfig
from cluster.deploy import deploy
from cluster.secret import cluster_secret
from workers.messages import SECRET_HEADER

T = TypeVar("T")


def wait_for(what: str, probe: Callable[[], T | None], deadline_s: float = 30.0) -> T:
    """The first truthy answer of `probe`; fails the test when there is none in time."""
    end = time.monotonic() + deadline_s
    while True:
        found = probe()
        if found:
            return found
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)


class Deployed:
    """One application. `redeploy` changes it, as `serve deploy` would."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        deploy(config, timeout_s=240)
        self.endpoint = config.endpoint
        self.http = httpx.Client(base_url=self.endpoint, timeout=120)

    def redeploy(self, **changes: Any) -> None:
        """Deploy again with other sections, given as maps that are merged into the old ones."""
        data = merged(self.config.model_dump(mode="json"), changes)
        self.config = ClusterConfig.parse(data)
        deploy(self.config, timeout_s=240)

    def delete(self) -> None:
        """Nothing where it, or Serve, is gone."""
        self.http.close()
        with suppress(RayServeException):
            serve.delete(self.config.name)

    def replicas(self) -> list[dict[str, Any]]:
        return self.http.get("/admin/replicas").json()["replicas"]  # type: ignore[no-any-return]

    def ready_replicas(self, count: int) -> list[dict[str, Any]]:
        """Wait until exactly so many replicas are ready, and no other is known."""

        def probe() -> list[dict[str, Any]] | None:
            found = self.replicas()
            return found if [r["state"] for r in found] == ["ready"] * count else None

        return wait_for(f"{count} ready replicas", probe, 60)

    def wait_idle(self) -> None:
        """Wait until the router has heard from every replica that it does nothing.

        A report that was made while the last request ran would make its replica look busy to the next one.
        """
        kinds = ("waiting", "running", "prefill_tokens", "open_requests")
        wait_for("idle replicas", lambda: not any(r[kind] for r in self.replicas() for kind in kinds))

    def pids(self, deployment: str) -> dict[str, int]:
        """Serve replica id -> process id."""
        details = serve.context._get_global_client().get_serve_details()
        replicas = details["applications"][self.config.name]["deployments"][deployment]["replicas"]
        return {r["replica_id"]: r["pid"] for r in replicas if r["state"] == "RUNNING"}

    def handle(self, deployment: str = "unified") -> DeploymentHandle:
        return serve.get_deployment_handle(deployment, self.config.name)

    def ask_replica(self, replica: dict[str, Any], method: str, path: str, **options: Any) -> httpx.Response:
        """Straight to the replica's own server, with the cluster's secret."""
        headers = options.pop("headers", {}) | {SECRET_HEADER: cluster_secret()}
        return httpx.request(
            method, f"http://{replica['address']}{path}", headers=headers, timeout=60, **options
        )

    def decisions(self) -> bytes:
        return self.http.get("/admin/decisions").content


def merged(old: Any, new: Any) -> Any:
    """Maps are merged key by key; anything else replaces."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: merged(old.get(key), value) for key, value in new.items()}
    return new
