"""What `/admin/replicas` answers: the routers and replicas of the cluster, as one router knows them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from router.core import RouterCore
from router.directory import ReplicaEntry

logger = logging.getLogger(__name__)

_CONTROLLER_TIMEOUT_S = 2.0


class Inventory:
    """`deployment` is the router deployment's name in the Serve application `app`."""

    def __init__(self, core: RouterCore, app: str, deployment: str, endpoint: str) -> None:
        self._core = core
        self._app = app
        self._deployment = deployment
        self._endpoint = endpoint

    async def describe(self) -> dict[str, Any]:
        """A JSON object; `manta status --json` prints it as it is."""
        chunks = self._core.index.stats().get("hbm")
        held = chunks.chunks if chunks is not None else {}
        replicas = [self._replica(entry, held.get(entry.info.id, 0)) for entry in self._core.directory]
        return {
            "ready": any(replica["state"] == "ready" for replica in replicas),
            "endpoint": self._endpoint,
            "routers": await self._routers(),
            "replicas": replicas,
            "queued": len(self._core.room),
            "open_requests": self._core.ledger.open_requests(),
            "transfer_refusals": self._core.pairing.refusals,
        }

    def _replica(self, entry: ReplicaEntry, chunks: int) -> dict[str, Any]:
        load = entry.load
        return {
            "id": entry.info.id,
            "role": entry.info.role,
            "node": entry.info.node,
            "address": entry.info.address,
            "state": self._core.directory.state(entry),
            "waiting": load.waiting if load else 0,
            "running": load.running if load else 0,
            "kv_used": load.kv_used if load else 0.0,
            "prefill_tokens": load.prefill_tokens if load else 0,
            "open_requests": load.http_requests if load else 0,
            "chunks": chunks,
            "snapshots": entry.stream.snapshots,
            "prefill_rate": load.prefill_rate if load else 0.0,
            "decode_rate": load.decode_rate if load else 0.0,
            "transfer": entry.info.transfer.kind if entry.info.transfer is not None else "",
            "no_transfer": entry.info.no_transfer,
        }

    async def _routers(self) -> list[dict[str, Any]]:
        """From Serve's controller; empty when that does not answer, which it may not while the head is away."""
        try:
            details = await asyncio.wait_for(asyncio.to_thread(_serve_details), _CONTROLLER_TIMEOUT_S)
            found = details["applications"][self._app]["deployments"][self._deployment]["replicas"]
        except Exception as error:
            logger.info("Serve's controller did not name the routers: %r", error)
            return []
        return [
            {
                "id": r["replica_id"],
                "node": r["node_id"],
                "address": r["node_ip"],
                "state": r["state"],
                "pid": r["pid"],
            }
            for r in found
        ]


def _serve_details() -> dict[str, Any]:
    from ray.serve.context import _get_global_client

    return _get_global_client().get_serve_details()  # type: ignore[no-any-return]
