"""Deploys a configuration to the Ray cluster that this process is connected to."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from ray import serve
from ray.serve.config import HTTPOptions

from cluster.app import build
from cluster.config import ClusterConfig, ConfigError
from cluster.neighbours import collisions
from cluster.roles import ray_nodes, wait_for_nodes
from router.shared_core import DEPLOYMENT as ROUTER

_POLL_S = 0.5


class DeployError(RuntimeError):
    """The application did not get ready. The message says what Serve says."""


@dataclass(frozen=True)
class DeployStatus:
    """How far a deployment is."""

    phase: str
    """What is going on, in a few words."""
    replicas_ready: int
    replicas_wanted: int
    """Of the pools; routers are not counted."""
    message: str = ""


def deploy(
    config: ClusterConfig,
    on_status: Callable[[DeployStatus], None] = lambda _: None,
    timeout_s: float = 3600.0,
) -> None:
    """Deploy and wait until the endpoint is ready, or until a pool that starts at zero is in place.

    Deploying again changes what differs. Raises DeployError.
    """
    on_status(DeployStatus("starting Ray Serve", 0, 0))
    serve.start(
        http_options=HTTPOptions(host=config.http.host, port=config.http.port),
        proxy_location=config.http.proxy_location,
    )
    if taken := collisions(config, serve.context._get_global_client().get_serve_details()):
        raise DeployError("\n".join(taken))
    target = serve.RunTarget(
        target=_application(config, on_status), name=config.name, route_prefix=config.http.route_prefix
    )
    serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    deadline = time.monotonic() + timeout_s
    while True:
        state, status = _status(config.name)
        on_status(status)
        if state == "RUNNING":
            starts_at_zero = all(
                pool.autoscaling and pool.autoscaling.min_replicas == 0 for pool in config.pools
            )
            if _answers(config.endpoint + ("/healthz" if starts_at_zero else "/readyz")):
                return
        elif state in ("DEPLOY_FAILED", "UNHEALTHY") and status.message:
            raise DeployError(status.message)
        if time.monotonic() > deadline:
            raise DeployError(f"not ready within {timeout_s:.0f} s: {status.phase} {status.message}")
        time.sleep(_POLL_S)


def _application(config: ClusterConfig, on_status: Callable[[DeployStatus], None]) -> serve.Application:
    def waiting(absent: list[str]) -> None:
        on_status(DeployStatus(f"waiting for nodes that offer {', '.join(absent)}", 0, 0))

    try:
        wait_for_nodes(config, ray_nodes, waiting)
        return build(config.model_dump(mode="json"))
    except ConfigError as error:
        raise DeployError(str(error)) from error


def _status(name: str) -> tuple[str, DeployStatus]:
    """Serve's word for the application's state, and what a person should know of it."""
    app = serve.status().applications.get(name)
    if app is None:
        return "", DeployStatus("deploying", 0, 0)
    ready = wanted = 0
    messages = [app.message] if app.message else []
    for deployment, details in app.deployments.items():
        if details.message:
            messages.append(f"{deployment}: {details.message}")
        if deployment == ROUTER:
            continue
        states = {str(state): count for state, count in details.replica_states.items()}
        ready += states.get("RUNNING", 0)
        wanted += sum(count for state, count in states.items() if state != "STOPPING")
    phase = "waiting for the router" if ready and ready == wanted else str(app.status.value).lower()
    return app.status.value, DeployStatus(phase, ready, wanted, "\n".join(messages))


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
