"""`manta export ray-up`: a configuration as the file that `ray up` takes, for machines of one's own or a cloud's.

The commands in it run the scripts of `cluster/ray-up/`, which the file copies to every host; cluster/README.md says
what they are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Literal

from cluster.cloud_hosts import CLIENTS, node_types
from cluster.config import ClusterConfig
from cluster.export import ExportError, require_device
from cluster.host_groups import ROUTER_ROLE, Machine, groups, lock_of
from cluster.ray_cluster import SERVE
from cluster.yaml_text import Note, render

Provider = Literal["local", "aws", "gcp"]

HEAD_STORE_BYTES = 256 << 20
BASE = "~/manta"
SCRIPTS = f"{BASE}/ray-up"
TOKEN = "~/.ray/auth_token"

HEALTH = {
    # A host that crashed is noticed in 3 seconds, one that was cut off in 6. Ray's own settings take 15 and 65.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
ENVIRONMENT = {
    # Left out, it would depend on whether somebody has left a token in ~/.ray.
    "RAY_AUTH_MODE": "token",
    **HEALTH,
    **SERVE,
    "RAY_SERVE_HAPROXY_BINARY_PATH": "$HOME/manta/ray-up/haproxy.sh",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""For Ray on every host, head and workers alike."""


@dataclass(frozen=True)
class Host:
    """A machine on premises."""

    address: str
    """As the others reach it: an IP address, or a name that all of them resolve."""
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Shipping:
    """Where the operator keeps what goes to the hosts, relative to where `ray up` is run."""

    wheel: str
    scripts: str = "cluster/ray-up"
    locks: str = "requirements"
    secrets: str = "~/.config/manta/secrets.env"
    """Lines of `NAME=value` for what the configuration names as `env:NAME`."""
    venv: str = ""
    """An environment that every host has already; nothing is installed then."""


@dataclass(frozen=True)
class OnPremises:
    """The machines. With none given, addresses to fill in."""

    head: str = "10.0.0.10"
    workers: tuple[Host, ...] = ()
    ssh_user: str = "ubuntu"
    ssh_key: str = "~/.ssh/id_ed25519"
    external_head: str = ""
    """The head's address for the operator, where that is another one."""


@dataclass(frozen=True)
class RayUp:
    """A cluster's file in the making."""

    config: ClusterConfig
    shipping: Shipping
    on_premises: OnPremises = field(default_factory=OnPremises)


def ray_up_text(plan: RayUp, provider: Provider) -> str:
    """The file, with comments. Raises ExportError for a device that only the cluster itself could name."""
    return render(ray_up_data(plan, provider))


def ray_up_data(plan: RayUp, provider: Provider) -> dict[Any, Any]:
    """What Ray's ray-schema.json describes, with notes among it (`cluster.yaml_text.plain` leaves them out)."""
    require_device(plan.config)
    if provider == "local":
        hosts, head_address, extra = _local(plan)
    else:
        hosts, head_address, extra = node_types(plan.config, provider), "", []
    return (
        {Note(_HEAD.format(name=plan.config.name)): None, Note(""): None, "cluster_name": plan.config.name}
        | hosts
        | _shipped(plan)
        | _commands(plan, provider, head_address, extra)
    )


def _local(plan: RayUp) -> tuple[dict[Any, Any], str, list[str]]:
    """Provider and ssh; the head's address; commands that tell hosts their roles."""
    there = plan.on_premises
    workers = there.workers or _placeholders(plan.config)
    known = {ROUTER_ROLE, *(pool.role for pool in plan.config.pools)}
    for host in workers:
        if unknown := set(host.roles) - known:
            raise ExportError(
                f"{host.address}: role {min(unknown)!r} found; needed: {', '.join(sorted(known))}"
            )
    if missing := known - {role for host in workers for role in host.roles}:
        raise ExportError(f"no worker takes the role {min(missing)!r}; needed: one or more for each role")
    provider: dict[Any, Any] = {
        "type": "local",
        Note("FILL IN: addresses by which the hosts reach each other, never 127.0.0.1." if not there.workers else
             "Addresses by which the hosts reach each other."): None,
        "head_ip": there.head,
        "worker_ips": [host.address for host in workers],
    }  # fmt: skip
    if there.external_head:
        provider["external_head_ip"] = there.external_head
    hosts = {
        Note("\n" + _LOCAL): None,
        "provider": provider,
        "max_workers": len(workers),
        Note("\nThe key is copied to the head, from where the workers are set up. Make one for this."): None,
        "auth": {"ssh_user": there.ssh_user, "ssh_private_key": there.ssh_key},
    }
    roles = [f"{host.address} {' '.join(host.roles)}" for host in workers]
    return hosts, there.head, [_write("roles", roles)]


def _placeholders(config: ClusterConfig) -> tuple[Host, ...]:
    machine = Machine(16, max(pool.resources.gpus_per_node for pool in config.pools))
    roles = [group.role for group in groups(config, lambda gpus: machine) for _ in range(max(1, group.most))]
    return tuple(Host(f"10.0.0.{number}", (role,)) for number, role in enumerate(roles, start=11))


def _shipped(plan: RayUp) -> dict[Any, Any]:
    mounts: dict[Any, Any] = {SCRIPTS: plan.shipping.scripts, TOKEN: TOKEN}
    if not plan.shipping.venv:
        wheel = PurePosixPath(plan.shipping.wheel)
        mounts |= {f"{BASE}/requirements": plan.shipping.locks, f"{BASE}/{wheel.name}": str(wheel)}
    if names := _secrets(plan.config):
        mounts |= {
            Note(
                f"FILL IN: lines of NAME=value, for {', '.join(names)}. For Ray alone, not for login shells."
            ): None,
            f"{BASE}/secrets.env": plan.shipping.secrets,
        }
    return {Note("\n" + _MOUNTS): None, "file_mounts": mounts}


def _secrets(config: ClusterConfig) -> list[str]:
    """Variables that the routers look their keys up in."""
    keys = [
        config.router.admin_key,
        *(key for tenant in config.router.tenants.values() for key in tenant.api_keys),
    ]
    return sorted({key.removeprefix("env:") for key in keys if key.startswith("env:")})


def _commands(plan: RayUp, provider: Provider, head_address: str, roles: Sequence[str]) -> dict[Any, Any]:
    config, shipping = plan.config, plan.shipping
    lock = lock_of(config)
    install = (
        f"{lock} {PurePosixPath(shipping.wheel).name}" if not shipping.venv else f"--use {shipping.venv}"
    )
    worker_setup = [
        Note("The disk cache: on local NVMe where there is one, else a folder."),
        f"{SCRIPTS}/cache-disk.sh {config.cache.disk.path}",
    ]
    head = ["--block", "--head", "--port=6379", "--num-cpus=0", "--num-gpus=0"]
    head += [f"--object-store-memory={HEAD_STORE_BYTES}", "--dashboard-host=0.0.0.0"]
    head += [f"--node-ip-address={head_address}"] if head_address else []
    head += ["--autoscaling-config=~/ray_bootstrap_config.yaml"]
    worker = [
        "--block",
        "--address=$RAY_HEAD_IP:6379",
        f"--object-store-memory={config.ray.object_store_mib << 20}",
    ]
    return {
        Note(
            "\nOn every host, head and workers: the environment of Ray, then the locked packages and Manta."
        ): None,
        "setup_commands": [
            _write("ray.env", [f"{name}={value}" for name, value in ENVIRONMENT.items()]),
            *([Note("What each host is for."), *roles] if roles else []),
            f"{SCRIPTS}/install.sh {install}",
        ],
        "head_setup_commands": _head_setup(provider, lock, shipping.venv),
        "worker_setup_commands": worker_setup if config.cache.disk.path else [],
        Note("\n" + _START): None,
        "head_start_ray_commands": [
            f"RAY_enable_autoscaler_v2=0 {SCRIPTS}/start.sh ray start {' '.join(head)}",
        ],
        "worker_start_ray_commands": [f"{SCRIPTS}/start.sh --keep ray start {' '.join(worker)}"],
    }


def _head_setup(provider: Provider, lock: str, venv: str) -> list[Any]:
    if provider == "local":
        return [Note("With `ray up --no-restart`, for the autoscaler that runs."), f"{SCRIPTS}/hosts.sh"]
    # The autoscaler speaks to the cloud; what for does not belong to the locks of every machine.
    python = f"{venv or f'{BASE}/venv'}/bin/python"
    limits = "" if venv else f" -c {BASE}/requirements/{lock}.lock"
    return [f"{python} -m pip install --quiet{limits} {CLIENTS[provider]}"]


def _write(name: str, lines: Sequence[str]) -> str:
    """A command that makes a file below the base folder."""
    return " \\\n".join(["printf '%s\\n'", *(f"  '{line}'" for line in lines), f"  > {BASE}/{name}"])


_HEAD = """\
A Ray cluster for {name}, written by `manta export ray-up`. From a clone of Manta, in its environment:

   ray get-auth-token --generate > /dev/null      # once; every host gets a copy
   rm -rf build && python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist .
   ray up FILE                                    # again after a change of this file
   cluster/ray-up/down.sh FILE                    # `ray down` alone stops the head only

cluster/README.md says what all of this is for, and goes on from here to the first answer."""

_LOCAL = """\
No `docker` section: the hosts' own Python runs Ray. No node types either, Ray knows one kind of host here: what each
is for stands in the list of roles below."""

_MOUNTS = """\
On the left where it goes on every host, on the right where it is here, seen from where `ray up` runs. The token lets
hosts, commands and jobs into the cluster; who has it can run anything there."""

_START = """\
start.sh keeps Ray running: a raylet that was cut off from the head gives up when the link returns, and is started
again. The head takes no replicas: it has no CPUs and no GPUs to give. Autoscaler v2, Ray's default, starts one worker
too few on premises, and replaces a cloud machine, with the cache on its disk, where v1 starts Ray again on it."""
