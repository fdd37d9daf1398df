"""Which cache actor a node has, and making it: name, address, socket.

Needs Ray, and is imported by deployments alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cache_store.cache_messages import CacheInfo
from cache_store.config import CacheConfig
from cache_store.free_ports import free_ports
from cache_store.node_errors import CacheSetupError

logger = logging.getLogger(__name__)

NAMESPACE = "manta"
"""Ray namespace of all cache actors."""
_ANSWER_TIMEOUT_S = 60.0
_TRIES = 3


def actor_name(app: str, node: str) -> str:
    return f"manta-cache-{app}-{node}"


def node_of(app: str, name: str) -> str | None:
    """Inverse of `actor_name`; None for actors of other kinds or applications."""
    prefix = actor_name(app, "")
    node = name.removeprefix(prefix)
    return node if name.startswith(prefix) and _is_hex(node) else None


def _is_hex(text: str) -> bool:
    return bool(text) and all(c in "0123456789abcdef" for c in text)


def socket_path(app: str, node: str) -> str:
    """Short, since a Unix socket's path has 107 bytes at most; in a folder that is its user's own."""
    digest = hashlib.sha256(f"{app}/{node}".encode()).hexdigest()[:16]
    return f"/tmp/manta-{os.getuid()}/{digest}/cache.sock"


def spec_digest(config: CacheConfig) -> str:
    """Changes with whatever makes another actor necessary."""
    try:
        package = version("manta-serve")
    except PackageNotFoundError:
        package = "unpackaged"
    return hashlib.sha256(f"{package}/{config.model_dump_json()}".encode()).hexdigest()


async def ensure_cache_actor(app: str, secret: str, config: CacheConfig, node: str) -> CacheInfo:
    """The cache actor of a node, made if there is none. One of another configuration is replaced: what it had in
    memory is lost, what it had on disk is not.

    Raises CacheSetupError when the node can't have one.
    """
    digest = spec_digest(config)
    for _ in range(_TRIES):
        actor = await asyncio.to_thread(_get_or_create, app, secret, config, node)
        try:
            info, found = await asyncio.wait_for(_described(actor), _ANSWER_TIMEOUT_S)
        except ray.exceptions.ActorDiedError as error:
            # Its constructor's error is in the text; a dead detached actor's name is free again.
            raise CacheSetupError(_reason(error)) from error
        except (ray.exceptions.RayActorError, TimeoutError) as error:
            logger.warning("the cache actor of this node does not answer: %r", error)
            continue
        if found == digest:
            return info
        logger.info("replacing the cache actor of this node: its configuration has changed")
        await asyncio.to_thread(ray.kill, actor, no_restart=True)
    raise CacheSetupError(f"no cache actor answered on node {node} in {_TRIES} tries")


def _get_or_create(app: str, secret: str, config: CacheConfig, node: str) -> Any:
    from cache_store.actor import CacheActor

    options: dict[str, Any] = {
        "name": actor_name(app, node),
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "lifetime": "detached",
        "max_restarts": -1,
        "num_cpus": 0,
        "max_concurrency": 1000,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    try:
        (port,) = free_ports(1)
    except OSError as error:
        raise CacheSetupError(str(error)) from error
    actor = ray.remote(CacheActor)
    return actor.options(**options).remote(app, secret, config.model_dump(mode="json"), port)


async def _described(actor: Any) -> tuple[CacheInfo, str]:
    info, digest = await actor.describe.remote()
    return msgspec.convert(info, CacheInfo), digest


def _reason(error: BaseException) -> str:
    """The last line of the constructor's traceback, which is what a person can act upon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    marked = [line for line in lines if "CacheSetupError:" in line]
    return (
        marked[-1].partition("CacheSetupError:")[2].strip() if marked else lines[-1] if lines else repr(error)
    )
