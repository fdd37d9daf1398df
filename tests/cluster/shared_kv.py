"""A deployed cluster that shares KV, and what tests ask of it: answers, where their KV came from, and bad days."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from cache_store.cache_messages import CacheInfo
from cluster.secret import cluster_secret
from router.headers import parse_cached
from tests.cluster.deployed import Deployed, wait_for
from tests.s3_server import S3Server
from workers.messages import SECRET_HEADER

TIERS = ("hbm", "dram", "peer", "disk", "remote")
CONNECTIONS = 2
"""Of an engine with its node's cache: its scheduler's and its worker's."""


class Answer(NamedTuple):
    tokens: list[int]
    cached: dict[str, int]
    """Prompt tokens by where their KV came from, of those that were not computed."""
    computed: int
    replica: str

    @property
    def loaded(self) -> int:
        return sum(self.cached.values())


class SharingCluster:
    """`Deployed`, with caches. Requests are the `tenant`'s, whose API key is `key-TENANT`; empty for no tenants."""

    def __init__(self, cluster: Deployed, replicas: int, tenant: str = "") -> None:
        self.cluster = cluster
        self.tenant = tenant
        self.app = cluster.config.name
        self.model = cluster.config.served_name
        self.replicas = cluster.ready_replicas(replicas)
        self.nodes = sorted({replica["node"] for replica in self.replicas})
        for node in self.nodes:
            self.wait_connected(node)

    def replica_on(self, node: str) -> str:
        return str(next(replica["id"] for replica in self.replicas if replica["node"] == node))

    # Requests.

    def ask(self, prompt: Sequence[int], tenant: str = "", model: str = "", max_tokens: int = 24) -> Answer:
        """Greedily, through the router. What header and usage say must be the same."""
        body = {
            "model": model or self.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
            "return_token_ids": True, "ignore_eos": True,
        }  # fmt: skip
        headers = {"authorization": f"Bearer key-{tenant or self.tenant}"}
        answer = self.cluster.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        content = answer.json()
        cached = parse_cached(answer.headers["x-manta-cached"])
        computed = cached.pop("computed")
        assert tuple(cached) == TIERS
        assert content["usage"]["prompt_tokens"] == sum(cached.values()) + computed == len(prompt)
        assert content["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(cached.values())
        tokens = content["choices"][0]["token_ids"]
        assert len(tokens) == max_tokens
        return Answer(tokens, cached, computed, answer.headers["x-manta-replica"])

    def compute(self, replica: str, prompt: Sequence[int], tenant: str = "", model: str = "") -> Answer:
        """Asks this replica alone, which must find nothing."""
        with self.only(replica):
            answer = self.ask(prompt, tenant, model)
        assert (answer.replica, answer.computed) == (replica, len(prompt))
        return answer

    def load(
        self, replica: str, prompt: Sequence[int], tier: str, cold: Answer, bytes_per_token: int
    ) -> None:
        """Asks this replica alone. The answer must be the cold one, and client, engine and store must tell alike of a
        prompt that was loaded from `tier` in whole chunks, and of its bytes."""
        size = self.cluster.config.cache.chunk_tokens
        whole = len(prompt) // size * size
        node = next(each["node"] for each in self.replicas if each["id"] == replica)
        engine, store = self.engine_counts(replica), self.read_bytes(node)
        with self.only(replica):
            answer = self.ask(prompt)
        assert answer.replica == replica
        assert answer.tokens == cold.tokens
        assert {name: tokens for name, tokens in answer.cached.items() if tokens} == {tier: whole}
        counts = {f"tokens {tier}": whole, f"bytes {tier}": whole * bytes_per_token}
        wait_for("the engine's counts", lambda: self.engine_counts(replica) - engine == counts)
        assert self.read_bytes(node)[tier] - store[tier] == whole * bytes_per_token
        self.check_rest()

    @contextmanager
    def only(self, replica: str) -> Iterator[None]:
        """New requests go there alone; the others drain."""
        others = [other["id"] for other in self.replicas if other["id"] != replica]
        for other in others:
            self._drain(other, undo=False)
        yield
        for other in others:
            self._drain(other, undo=True)

    def _drain(self, replica: str, undo: bool) -> None:
        answer = self.cluster.http.post("/admin/replicas/drain", json={"name": replica, "undo": undo})
        assert answer.status_code == 200, answer.text
        state = "ready" if undo else "draining"

        def states() -> dict[str, str]:
            return {each["id"]: each["state"] for each in self.cluster.replicas()}

        wait_for(f"{replica} is {state}", lambda: states()[replica] == state)

    # What is where.

    def chunks(self, prompt: Sequence[int], model: str = "") -> list[dict[str, Any]]:
        """Key and places of the prompt's chunks."""
        body: dict[str, Any] = {"prompt": list(prompt), "model": model or self.model}
        if self.tenant:
            body["tenant"] = self.tenant
        answer = self.cluster.http.post("/admin/cache/lookup", json=body)
        assert answer.status_code == 200, answer.text
        (engines,) = answer.json()["engines"]
        found: list[dict[str, Any]] = engines["chunks"]
        return found

    def wait_kept(self, prompt: Sequence[int], *tiers: str, model: str = "") -> list[str]:
        """The prompt's keys, once all its chunks are in these tiers of some node and the router knows."""

        def kept() -> list[str] | None:
            chunks = self.chunks(prompt, model)
            there = all(chunk[tier] for chunk in chunks for tier in tiers)
            return [chunk["key"] for chunk in chunks] if there and all(map(self._indexed, tiers)) else None

        return wait_for(f"its chunks in {', '.join(tiers)}", kept)

    def _indexed(self, tier: str) -> bool:
        """Whether the router knows of as many chunks as the nodes have."""
        page = self.cluster.http.get("/metrics").text
        line = next(
            line
            for line in page.splitlines()
            if line.startswith(f'manta_router_index_chunks{{tier="{tier}"}}')
        )
        held = [node["tiers"][tier]["chunks"] for node in self.stats()]
        return float(line.rsplit(" ", 1)[1]) == (max(held) if tier == "remote" else sum(held))

    def stats(self) -> list[dict[str, Any]]:
        answer = self.cluster.http.get("/admin/cache/stats").json()
        assert not answer["problems"]
        nodes: list[dict[str, Any]] = answer["nodes"]
        return nodes

    def tier_works(self, node: str, tier: str) -> bool:
        return all(each["tiers"][tier]["healthy"] for each in self.stats() if each["node"] == node)

    def read_bytes(self, node: str) -> dict[str, int]:
        """What the node's cache handed to engines, by the tier that it came from."""
        stats = next(each for each in self.stats() if each["node"] == node)
        counts: dict[str, int] = stats["counters"]["loaded_bytes"]
        return counts

    def engine_counts(self, replica: str) -> Counter[str]:
        """`tokens TIER` and `bytes TIER`, as the engine has loaded them."""
        counts: Counter[str] = Counter()
        for kind in ("tokens", "bytes"):
            for tier, count in self._engine_counts(replica, f"manta_kv_loaded_{kind}_total", "tier").items():
                counts[f"{kind} {tier}"] = count
        return counts

    def load_failures(self, replica: str) -> Counter[str]:
        """Loads of the engine that failed, by reason."""
        return self._engine_counts(replica, "manta_kv_load_failures_total", "reason")

    def _engine_counts(self, replica: str, metric: str, label: str) -> Counter[str]:
        info = next(each for each in self.replicas if each["id"] == replica)
        counts: Counter[str] = Counter()
        for line in self.cluster.ask_replica(info, "GET", "/metrics").text.splitlines():
            if line.startswith(f"{metric}{{"):
                value = line.partition(f'{label}="')[2].partition('"')[0]
                counts[value] += int(float(line.rsplit(" ", 1)[1]))
        return counts

    def holds_blocks(self, replica: str) -> bool:
        """Whether blocks of the engine are in use."""
        info = next(each for each in self.replicas if each["id"] == replica)
        page = self.cluster.ask_replica(info, "GET", "/metrics").text
        return any(
            line.startswith("vllm:kv_cache_usage_perc") and float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
        )

    def check_rest(self) -> None:
        """Nothing is under way, no actor contradicts itself, and of what has ended nothing is left."""
        import ray

        self.cluster.wait_idle()
        kinds = ("leases", "pinned", "flights", "saving", "dram_leaving")
        wait_for("caches at rest", lambda: not any(node[kind] for node in self.stats() for kind in kinds))
        for node in self.stats():
            assert node["dram_in_use"] == node["tiers"]["dram"]["bytes"] <= node["tiers"]["dram"]["capacity"]
            ray.get(actor_of(self.app, node["node"]).check_integrity.remote(), timeout=20)

    # Bad days.

    def pid(self, node: str) -> int:
        import ray

        pid: int = ray.get(actor_of(self.app, node).pid.remote(), timeout=20)
        return pid

    def kill_cache(self, node: str) -> None:
        """As `kill -9` does, and wait for the actor that Ray starts in its place and for its engines."""
        before = self.pid(node)
        os.kill(before, signal.SIGKILL)
        self.wait_replaced(node, before)

    def wait_replaced(self, node: str, before: int) -> None:
        """Another actor than the one of this pid is there, and has its engines."""
        wait_for("another actor", lambda: _is_another(self.app, node, before), 60)
        self.wait_connected(node)

    @contextmanager
    def held_up(self, replica: str, prompt: Sequence[int], s3: S3Server) -> Iterator[Future[Answer]]:
        """A request of this replica alone, which amid its load waits for S3 until the context ends, or `s3` resumes."""
        with self.only(replica), ThreadPoolExecutor(1) as pool:
            s3.pause()
            try:
                asking = pool.submit(self.ask, prompt)
                wait_for("its load has begun", lambda: self.holds_blocks(replica))
                yield asking
            finally:
                s3.resume()

    def wait_connected(self, node: str) -> None:
        """The node's cache has its engines, and the router has it."""
        info = cache_info(self.app, node)
        engines = sum(replica["node"] == node for replica in self.replicas)

        def connected() -> bool:
            try:
                page = httpx.get(
                    f"http://{info.address}/metrics", headers={SECRET_HEADER: cluster_secret()}, timeout=5
                ).text
            except httpx.HTTPError:
                return False
            known = self.cluster.http.get("/admin/cache/stats")
            return (
                f"manta_cache_connections {CONNECTIONS * engines:.1f}\n" in page
                and known.status_code == 200
                and not known.json()["problems"]
                and node in [each["node"] for each in known.json()["nodes"]]
            )

        wait_for("the engines at their cache", connected, 60)


def cache_info(app: str, node: str) -> CacheInfo:
    import msgspec
    import ray

    info, _ = ray.get(actor_of(app, node).describe.remote(), timeout=30)
    return msgspec.convert(info, CacheInfo)


def actor_of(app: str, node: str) -> Any:
    import ray

    from cache_store.node_actor import NAMESPACE, actor_name

    return ray.get_actor(actor_name(app, node), NAMESPACE)


def _is_another(app: str, node: str, before: int) -> bool:
    """Whether the actor answers, as another process."""
    import ray

    try:
        return bool(ray.get(actor_of(app, node).pid.remote(), timeout=20) != before)
    except ray.exceptions.RayActorError:
        return False


def end_caches(app: str) -> None:
    """What the end of a cluster does: actors outlive their application."""
    import ray
    from ray.util import list_named_actors

    from cache_store.node_actor import NAMESPACE, node_of

    for named in list_named_actors(all_namespaces=True):
        if named["namespace"] == NAMESPACE and node_of(app, named["name"]) is not None:
            ray.kill(ray.get_actor(named["name"], NAMESPACE))


def remove_files(folder: Path, keys: Sequence[str]) -> None:
    """Chunks by their keys, below a tier's folder."""
    for key in keys:
        (file,) = folder.glob(f"*/{key[:2]}/{key}.0.kv")
        file.unlink()


def s3_uri(server: S3Server) -> str:
    """With the key in it: actors have their environment from the start of Ray."""
    access, secret = (server.environment[f"AWS_{name}"] for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
    return server.uri().replace("s3://", f"s3://{access}:{secret}@", 1)
