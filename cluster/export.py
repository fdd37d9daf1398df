"""`manta export serve`: a configuration as the file that `serve deploy` takes.

What must restart the deployments stands in the application's `args`, what may change live stands below `deployments`:
counts, autoscaling, and the router's `user_config`. Serve restarts every deployment of an application when its `args`
change, so a value stands in one of the two places only, and exporting again after a live change leaves `args` as they
were. (Serve counts an autoscaling policy as code: it restarts all when one appears or goes.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

from cluster import secret
from cluster.config import ClusterConfig
from cluster.config_docs import effect_of
from cluster.yaml_text import Note, render

IMPORT_PATH = "cluster.app:build"
SCALED = ("num_replicas", "autoscaling_config", "ray_actor_options", "user_config")
PLACED = (
    "max_replicas_per_node", "placement_group_bundles", "placement_group_strategy",
    "placement_group_bundle_label_selector",
)  # fmt: skip
"""Options of a deployment that the file states where the code sets them; the rest stays the code's own."""
_LIVE = ("live", "scales")

HEAD = """\
Serve's deployment of {name}, written by `manta export serve`. On the head, or through `ray dashboard`:

   serve deploy serve.yaml
   serve status

Live below `deployments`: counts, the numbers of `autoscaling_config`, the router's `user_config`. Other options of a
deployment restart that one. All deployments restart, a part at a time and after their open requests, when something
below `args` changes, and when the autoscaling of a pool begins or ends."""

PROXIES = """\
EveryNode: a proxy on every host that runs a router or a replica, and one beside Serve's controller on the head. Send
clients to the hosts of routers; a firewall may close the port on the others."""

ARGS = "`args` are the fields of the configuration, except for what `deployments` says."

LOOPBACK = """\
FILL IN: only programs on the router's own host reach {host}. 0.0.0.0 lets other machines in; give keys to
router.tenants first. `args.http` below says the same, for what the routers tell of themselves."""


class ExportError(ValueError):
    """A configuration that can't be written for another machine. The message says what it needs."""


def serve_text(config: ClusterConfig) -> str:
    """The file, with comments. Raises ExportError as `serve_config` does."""
    data = serve_config(config)
    http = data.pop("http_options")
    application = data.pop("applications")[0]
    deployments = application.pop("deployments")
    loopback = {Note(LOOPBACK.format(host=http["host"])): None} if _is_loopback(http["host"]) else {}
    return render(
        {
            Note(HEAD.format(name=config.name)): None,
            Note("\n" + PROXIES): None,
            **data,
            Note(""): None,
            "http_options": loopback | http,
            Note("\n" + ARGS): None,
            "applications": [
                application
                | {
                    Note(
                        "Of the router all of `user_config` is live; a field that is left out has its default."
                    ): None,
                    "deployments": deployments,
                }
            ],
        }
    )


def serve_config(config: ClusterConfig) -> dict[str, Any]:
    """What `ray.serve.schema.ServeDeploySchema` describes, in plain JSON types.

    `cluster.app` is asked for the deployments, so that the file says what the code would do. Raises ExportError for
    a device that only the cluster itself could name.
    """
    deployments = [_listed(deployment) for deployment in _built(config)]
    return {
        "proxy_location": config.http.proxy_location,
        "http_options": {"host": config.http.host, "port": config.http.port},
        "applications": [
            {
                "name": config.name,
                "route_prefix": config.http.route_prefix,
                "import_path": IMPORT_PATH,
                "args": _args(config),
                "deployments": deployments,
            }
        ],
    }


def require_device(config: ClusterConfig) -> None:
    """Raises ExportError where `engine.device` leaves the choice to a cluster that is not there yet."""
    if config.engine.kind == "vllm" and config.engine.device == "auto":
        raise ExportError(
            "engine.device is auto; needed: cpu or cuda, since the file is written before there is a cluster to look at"
        )


def _built(config: ClusterConfig) -> Iterator[dict[str, Any]]:
    """Serve's own description of every deployment, the router last."""
    # Importing Ray takes seconds; a wrong configuration should be told before.
    require_device(config)
    from ray.serve._private.build_app import build_app
    from ray.serve.deployment import deployment_to_schema

    from cluster.app import build

    # Where the weights lie is for the cluster's machines to find: a folder of theirs need not be here.
    model = config.model.model_copy(update={"path": "exported/model", "name": config.served_name})
    # A simulated engine runs nowhere; left open, the application would ask a cluster for its devices.
    device = config.engine.device if config.engine.kind == "vllm" else "cpu"
    engine = config.engine.model_copy(update={"device": device})
    with _any_secret():
        application = build(
            config.model_copy(update={"model": model, "engine": engine}).model_dump(mode="json")
        )
    for deployment in build_app(application, name=config.name).deployments:
        # Options that code sets count as nobody's choice, and Serve describes only what somebody chose.
        placed = [name for name in PLACED if getattr(deployment._replica_config, name, None) is not None]
        deployment._deployment_config.user_configured_option_names = {*SCALED, *placed}
        yield deployment_to_schema(deployment).model_dump(mode="json", exclude_unset=True)


def _listed(deployment: dict[str, Any]) -> dict[str, Any]:
    listed = {name: value for name, value in deployment.items() if value is not None}
    if "user_config" in listed:
        live = listed["user_config"].items()
        listed["user_config"] = {name: value for name, value in live if effect_of(f"router.{name}") == "live"}
    return listed


def _args(config: ClusterConfig) -> dict[str, Any]:
    """As the user wrote them, without what `deployments` says and what only `manta up` needs."""
    args = config.model_dump(mode="json", exclude_unset=True)
    args.pop("ray", None)
    args["router"] = _not_live("router", args.get("router", {}))
    args["pools"] = [_not_live("pools", pool) for pool in args.get("pools", [{}])]
    return {name: value for name, value in args.items() if value or name == "name"}


def _not_live(section: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if effect_of(f"{section}.{name}") not in _LIVE}


@contextmanager
def _any_secret() -> Iterator[None]:
    """Without one in the environment the application would ask a Ray cluster for its secret."""
    before = os.environ.get(secret.VARIABLE)
    os.environ[secret.VARIABLE] = "no-secret-leaves-this-process"
    try:
        yield
    finally:
        if before is None:
            del os.environ[secret.VARIABLE]
        else:
            os.environ[secret.VARIABLE] = before


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
