"""A real model's KV from every tier: SmolLM2 in float32, three prompts of fifteen hundred tokens.

A replica has room for little more than one of them and so does the memory of the first node's cache, so that each of
them has to be fetched again whenever it is asked for.
"""

from __future__ import annotations

import heapq
import inspect
import random
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray import serve
from transformers import AutoTokenizer

from cluster.state import ClusterState
from tests.cluster.conftest import CPU_ENGINE
from tests.cluster.deployed import Deployed, merged
from tests.cluster.second_node import SecondNode, alive_nodes
from tests.cluster.shared_kv import Answer, SharingCluster, end_caches, remove_files, s3_uri
from tests.s3_server import S3Server, s3_server

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

CHUNK, CHUNKS = 256, 6
BYTES_PER_TOKEN = 30 * 2 * 3 * 64 * 4
"""Keys and values of 30 layers with three heads of 64, in float32."""
TEXTS = {module.__name__: module for module in (textwrap, heapq, random)}


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> dict[str, list[int]]:
    """Whole chunks and a few tokens of real text."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return {
        name: tokenizer.encode(inspect.getsource(module))[: CHUNK * CHUNKS + 10]
        for name, module in TEXTS.items()
    }


@pytest.fixture(scope="module")
def deploy_smollm2(deploy: Callable[..., Deployed], smollm2: Path) -> Callable[..., Deployed]:
    args = {"max-model-len": 2048, "kv-cache-memory-bytes": 100 * 1024 * 1024}
    base = {
        "model": {"path": str(smollm2), "name": "smollm2"},
        "engine": merged(CPU_ENGINE, {"args": args}),
        "cache": {"chunk_tokens": CHUNK, "share": "on", "disk": {"admission": "always"}},
    }

    def make(replicas: int, **sections: object) -> Deployed:
        pool = {"role": "unified", "replicas": replicas, "drain_timeout_s": 10, "resources": {"cores": 1}}
        return deploy(base, {"pools": [pool]}, sections)

    return make


# One node.


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiers")
    (folder / "remote").mkdir()
    return {"disk": folder / "disk", "remote": folder / "remote"}


@pytest.fixture(scope="module")
def kept(tiers: dict[str, Path]) -> dict[str, object]:
    return {
        "disk": {"path": str(tiers["disk"])},
        "remote": {"uri": f"file://{tiers['remote']}", "admission": "always"},
    }


@pytest.fixture(scope="module")
def cluster(deploy_smollm2: Callable[..., Deployed], kept: dict[str, object]) -> SharingCluster:
    return SharingCluster(deploy_smollm2(2, cache=kept), replicas=2)


@pytest.fixture(scope="module")
def cold(cluster: SharingCluster, prompts: dict[str, list[int]]) -> dict[str, Answer]:
    """Computed by the first replica and, while each is in memory, loaded by the second."""
    first, second = (str(replica["id"]) for replica in cluster.replicas)
    answers = {}
    for name, prompt in prompts.items():
        answers[name] = cluster.compute(first, prompt)
        cluster.wait_kept(prompt, "dram", "disk", "remote")
        cluster.load(second, prompt, "dram", answers[name], BYTES_PER_TOKEN)
        with cluster.only(first):
            again = cluster.ask(prompt)
        assert again.tokens == answers[name].tokens
        assert again.cached["hbm"] == again.loaded == CHUNK * CHUNKS
    return answers


def test_it_is_loaded_from_memory_on_the_same_node(cold: dict[str, Answer]) -> None:
    """Which is how `cold` comes about. The answers are to what is asked."""
    assert len({tuple(answer.tokens) for answer in cold.values()}) == len(TEXTS)


def test_it_is_loaded_from_disk_after_the_cache_was_killed(
    cluster: SharingCluster, cold: dict[str, Answer], prompts: dict[str, list[int]]
) -> None:
    cluster.kill_cache(cluster.nodes[0])
    for name, prompt in prompts.items():
        cluster.load(cluster.replicas[1]["id"], prompt, "disk", cold[name], BYTES_PER_TOKEN)


@pytest.fixture(scope="module")
def restarted(
    cluster: SharingCluster,
    cold: dict[str, Answer],
    deploy_smollm2: Callable[..., Deployed],
    kept: dict[str, object],
) -> SharingCluster:
    serve.delete(cluster.app)
    end_caches(cluster.app)
    return SharingCluster(deploy_smollm2(1, cache=kept), replicas=1)


def test_it_is_loaded_from_disk_after_everything_restarted(
    restarted: SharingCluster, cold: dict[str, Answer], prompts: dict[str, list[int]]
) -> None:
    for name, prompt in prompts.items():
        restarted.load(restarted.replicas[0]["id"], prompt, "disk", cold[name], BYTES_PER_TOKEN)


def test_it_is_loaded_from_a_remote_folder_once_the_disk_is_empty(
    restarted: SharingCluster, cold: dict[str, Answer], prompts: dict[str, list[int]], tiers: dict[str, Path]
) -> None:
    for prompt in prompts.values():
        remove_files(tiers["disk"], [chunk["key"] for chunk in restarted.chunks(prompt)])
    restarted.kill_cache(restarted.nodes[0])
    for name, prompt in prompts.items():
        restarted.load(restarted.replicas[0]["id"], prompt, "remote", cold[name], BYTES_PER_TOKEN)


# Two nodes, and a remote store that speaks S3.


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def two_nodes(
    ray_head: ClusterState, deploy_smollm2: Callable[..., Deployed], s3: S3Server
) -> Iterator[SharingCluster]:
    """A replica on each, the second of which has memory for all prompts."""
    # One address for both nodes has room for one proxy, and Serve keeps to what it was started with.
    serve.shutdown()
    (here,) = alive_nodes()
    with SecondNode(ray_head, object_store_mib=600) as second:
        deployed = deploy_smollm2(
            2,
            cache={"remote": {"uri": s3_uri(s3), "admission": "always"}},
            http={"proxy_location": "HeadOnly"},
            placement={"max_replicas_per_node": 1},
        )
        try:
            cluster = SharingCluster(deployed, replicas=2)
            cluster.nodes = [here, second.id]
            yield cluster
        finally:
            deployed.delete()
            end_caches(deployed.config.name)


def test_it_is_loaded_from_the_memory_of_another_node_and_from_s3(
    two_nodes: SharingCluster, cold: dict[str, Answer], prompts: dict[str, list[int]]
) -> None:
    here, there = map(two_nodes.replica_on, two_nodes.nodes)
    for name, prompt in prompts.items():
        assert two_nodes.compute(here, prompt).tokens == cold[name].tokens
        two_nodes.wait_kept(prompt, "dram", "remote")
        two_nodes.load(there, prompt, "peer", cold[name], BYTES_PER_TOKEN)
        # What was lent stays for a while, and the first node has no memory for another prompt beside it.
        for node in two_nodes.nodes:
            two_nodes.kill_cache(node)
    for name, prompt in prompts.items():
        two_nodes.load(there, prompt, "remote", cold[name], BYTES_PER_TOKEN)
