"""A further node for the tests' Ray, on this machine: another raylet with an object store of its own."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from cluster.ray_cluster import RAY_FOLDER
from cluster.state import ClusterState

DEADLINE_S = 60.0


class SecondNode:
    """A context manager. The driver of this process must be connected."""

    def __init__(self, head: ClusterState, object_store_mib: int = 120) -> None:
        self._head = head
        self._object_store_bytes = object_store_mib << 20
        self.id = ""
        """Ray node id, hex."""

    def __enter__(self) -> Self:
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        before = alive_nodes()
        params = RayParams(
            gcs_address=self._head.ray_address,
            redis_address=self._head.ray_address,
            node_ip_address="127.0.0.1",
            object_store_memory=self._object_store_bytes,
            num_cpus=1,
            min_worker_port=0,
            max_worker_port=0,
            dashboard_agent_listen_port=0,
            temp_dir=f"{self._head.temp}/{RAY_FOLDER}",
        )
        self._node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
        deadline = time.monotonic() + DEADLINE_S
        while not (new := alive_nodes() - before):
            assert time.monotonic() < deadline, "the node did not join"
            time.sleep(0.05)
        (self.id,) = new
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._node.kill_all_processes(check_alive=False, allow_graceful=True)
        deadline = time.monotonic() + DEADLINE_S
        while self.id in alive_nodes():
            assert time.monotonic() < deadline, "the node did not leave"
            time.sleep(0.05)


def alive_nodes() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
