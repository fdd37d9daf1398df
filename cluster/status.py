"""What a cluster says of itself at `/admin/replicas`."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import msgspec

from cluster.admin import admin_key
from cluster.state import ClusterState


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One replica as the router knows it."""

    id: str
    role: str = ""
    node: str = ""
    address: str = ""
    state: str = ""
    waiting: int = 0
    running: int = 0
    open_requests: int = 0
    """At the replica's HTTP server."""
    kv_used: float = 0.0
    """Part of the engine's KV blocks in use, 0 to 1."""


class Answer(msgspec.Struct, frozen=True):
    """The shape of `/admin/replicas`."""

    ready: bool
    endpoint: str
    routers: list[Any] = []
    replicas: list[ReplicaStatus] = []


class Status(msgspec.Struct, frozen=True):
    """An answer, or why there is none."""

    running: bool
    answer: Answer
    raw: bytes = b""
    """The cluster's own JSON, where it answered."""
    problem: str = ""

    @property
    def ready(self) -> bool:
        return self.running and self.answer.ready

    def to_json(self) -> str:
        """Exactly what the cluster answered; in the same shape where it did not."""
        return (self.raw or msgspec.json.encode(self.answer)).decode()


def ask(cluster: ClusterState, timeout_s: float = 10.0) -> Status:
    """Never raises for a cluster that does not answer: that is a status."""
    nothing = Answer(ready=False, endpoint=cluster.endpoint)
    request = urllib.request.Request(f"{cluster.endpoint}/admin/replicas")
    if key := admin_key(cluster.config):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            raw = response.read()
        return Status(True, msgspec.json.decode(raw, type=Answer), raw)
    except urllib.error.HTTPError as error:
        said = error.read(300).decode(errors="replace").strip()
        return Status(True, nothing, problem=f"{request.full_url} answered {error.code}: {said}")
    except (OSError, msgspec.MsgspecError) as error:
        reason = getattr(error, "reason", error)
        # Of a Ray that was there before, the endpoint is all that can be asked whether it runs.
        return Status(
            cluster.head is not None, nothing, problem=f"{request.full_url} does not answer: {reason}"
        )


def not_running(cluster: ClusterState | None) -> Status:
    """For no known cluster, or one whose head is gone."""
    problem = f"{cluster.name} ended without `manta down`, which will tidy up" if cluster else ""
    return Status(False, Answer(ready=False, endpoint=cluster.endpoint if cluster else ""), problem=problem)
