"""KV that one replica computed, used by others: from every tier, through the router, on one node and on two.

Every test has a prompt of its own, which the first replica of a cluster computes before; the second never computes a
long prompt, so that it knows no rate of its own and loads whatever there is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from ray import serve

from cluster.state import ClusterState
from tests.cluster.deployed import Deployed, wait_for
from tests.cluster.second_node import SecondNode
from tests.cluster.shared_kv import Answer, SharingCluster, end_caches, remove_files, s3_uri
from tests.s3_server import S3Server, s3_server
from tests.tiny_adapter import make_tiny_adapter
from tests.tiny_model import VOCAB

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(420)]

BLOCK, CHUNK, CHUNKS = 32, 64, 23
WHOLE = CHUNKS * CHUNK
BYTES_PER_TOKEN = 2 * 2 * 32 * 4
"""Keys and values of two layers, in float32."""
HANG_S = 10.0


def words(name: str) -> list[int]:
    """A prompt that begins like no other: whole chunks, and a few tokens."""
    random = Random(name)
    return [random.randrange(3, VOCAB) for _ in range(WHOLE + 6)]


# One node, with a disk and a folder that stands for a remote store.


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def deploy_sharing(deploy_vllm: Callable[..., Deployed], folders: Path) -> Callable[..., Deployed]:
    """With a LoRA adapter named `style`, of the given seed."""
    (folders / "remote").mkdir()

    def make(replicas: int, adapter: int, block: int = BLOCK) -> Deployed:
        style = make_tiny_adapter(folders / f"style-{adapter}", adapter)
        keep = {"admission": "always"}
        return deploy_vllm(
            model={"adapters": {"style": str(style)}},
            engine={"args": {"max-loras": 1, "max-lora-rank": 8, "block-size": block}},
            pools=[
                {"role": "unified", "replicas": replicas, "drain_timeout_s": 10, "resources": {"cores": 1}}
            ],
            cache={
                "share": "on",
                "staging_mib": 4,
                "disk": keep | {"path": str(folders / "disk")},
                "remote": keep | {"uri": f"file://{folders / 'remote'}"},
            },
            router={"tenants": {name: {"api_keys": [f"key-{name}"]} for name in ("a", "b")}},
        )

    return make


@pytest.fixture(scope="module")
def cluster(deploy_sharing: Callable[..., Deployed]) -> SharingCluster:
    return SharingCluster(deploy_sharing(2, adapter=1), replicas=2, tenant="a")


@pytest.fixture(scope="module")
def first(cluster: SharingCluster) -> str:
    return str(cluster.replicas[0]["id"])


@pytest.fixture(scope="module")
def second(cluster: SharingCluster) -> str:
    return str(cluster.replicas[1]["id"])


@pytest.fixture(scope="module")
def cold(cluster: SharingCluster, first: str) -> dict[str, Answer]:
    """Answers of the first replica, which computed them; their KV is in all tiers since."""
    answers = {
        name: cluster.compute(first, words(name)) for name in ("memory", "killed", "restart", "remote")
    }
    for name in answers:
        cluster.wait_kept(words(name), "dram", "disk", "remote")
    answers["style"] = cluster.compute(first, words("restart"), model="style")
    cluster.wait_kept(words("restart"), "disk", model="style")
    assert answers["style"].tokens != answers["restart"].tokens, "the adapter changes nothing"
    return answers


def test_a_replica_finds_its_own(cluster: SharingCluster, first: str, cold: dict[str, Answer]) -> None:
    with cluster.only(first):
        again = cluster.ask(words("memory"))
    assert again.tokens == cold["memory"].tokens
    assert (again.cached["hbm"], again.loaded) == (WHOLE, WHOLE)


def test_a_prefix_that_one_replica_computed_is_loaded_by_another_on_its_node(
    cluster: SharingCluster, second: str, cold: dict[str, Answer]
) -> None:
    cluster.load(second, words("memory"), "dram", cold["memory"], BYTES_PER_TOKEN)


def test_prompts_that_were_warmed_are_loaded_by_others(
    cluster: SharingCluster, first: str, second: str, tmp_path: Path
) -> None:
    prompts = [words("warmed"), words("warmed too")]
    cold = [cluster.compute(first, prompt, tenant="b") for prompt in prompts]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    with cluster.only(first):
        told = warm(cluster, file, "--tenant", cluster.tenant)
    tokens = sum(map(len, prompts))
    assert (told["prompts"], told["prompt_tokens"], told["computed"]) == (2, tokens, tokens)
    assert (told["chunks"], told["stored"], told["failed"]) == (2 * CHUNKS, 2 * CHUNKS, [])
    for prompt, answer in zip(prompts, cold, strict=True):
        cluster.load(second, prompt, "dram", answer, BYTES_PER_TOKEN)
    with cluster.only(first):
        told = warm(cluster, file, "--tenant", cluster.tenant)
    assert told["computed"] == tokens - 2 * WHOLE
    assert told["cached"]["hbm"] == 2 * WHOLE


def warm(cluster: SharingCluster, file: Path, *options: str) -> dict[str, Any]:
    """What `manta cache warm` tells at its end."""
    command = [sys.executable, "-m", "cluster.cli", "cache", "warm", str(file), "--json", *options]
    done = subprocess.run(
        [*command, "--endpoint", cluster.cluster.endpoint], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_after_its_cache_was_killed_it_comes_from_disk(
    cluster: SharingCluster, second: str, cold: dict[str, Answer]
) -> None:
    cluster.kill_cache(cluster.nodes[0])
    assert not any(chunk["dram"] for chunk in cluster.chunks(words("killed")))
    cluster.load(second, words("killed"), "disk", cold["killed"], BYTES_PER_TOKEN)


def test_another_tenant_finds_nothing(cluster: SharingCluster, first: str, cold: dict[str, Answer]) -> None:
    answer = cluster.compute(first, words("memory"), tenant="b")
    assert answer.tokens == cold["memory"].tokens


def test_a_cache_that_hangs_holds_up_no_answer(
    cluster: SharingCluster, first: str, cold: dict[str, Answer]
) -> None:
    prompt, pid = words("hangs"), cluster.pid(cluster.nodes[0])
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = cluster.compute(first, prompt)
    finally:
        os.kill(pid, signal.SIGCONT)
    cluster.wait_connected(cluster.nodes[0])
    assert cluster.compute(first, prompt, tenant="b").tokens == answer.tokens
    cluster.check_rest()


# The same after everything of it has ended, and begins again with what is on disk.


@pytest.fixture(scope="module")
def restarted(
    cluster: SharingCluster, cold: dict[str, Answer], deploy_sharing: Callable[..., Deployed], folders: Path
) -> SharingCluster:
    """One replica, with other weights under the adapter's name. One prompt is gone from the disk."""
    lost = [chunk["key"] for chunk in cluster.chunks(words("remote"))]
    serve.delete(cluster.app)
    end_caches(cluster.app)
    remove_files(folders / "disk", lost)
    return SharingCluster(deploy_sharing(1, adapter=2), replicas=1, tenant="a")


@pytest.mark.parametrize(("name", "tier"), [("restart", "disk"), ("remote", "remote")])
def test_after_a_restart_it_comes_from_where_it_was_kept(
    restarted: SharingCluster, cold: dict[str, Answer], name: str, tier: str
) -> None:
    restarted.load(restarted.replicas[0]["id"], words(name), tier, cold[name], BYTES_PER_TOKEN)


def test_an_adapter_of_the_same_name_and_other_weights_finds_nothing(
    restarted: SharingCluster, cold: dict[str, Answer]
) -> None:
    answer = restarted.compute(restarted.replicas[0]["id"], words("restart"), model="style")
    assert answer.tokens != cold["style"].tokens


def test_an_engine_with_other_blocks_finds_nothing_and_answers_alike(
    restarted: SharingCluster, cold: dict[str, Answer], deploy_sharing: Callable[..., Deployed]
) -> None:
    before = {chunk["key"] for chunk in restarted.chunks(words("restart"))}
    other = SharingCluster(deploy_sharing(1, adapter=2, block=2 * BLOCK), replicas=1, tenant="a")
    answer = other.compute(other.replicas[0]["id"], words("restart"))
    assert answer.tokens == cold["restart"].tokens
    assert before.isdisjoint(chunk["key"] for chunk in other.chunks(words("restart")))


# Two nodes, and a remote store that speaks S3.


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def two_nodes(
    ray_head: ClusterState, deploy_vllm: Callable[..., Deployed], s3: S3Server
) -> Iterator[SharingCluster]:
    """A replica on each."""
    # One address for both nodes has room for one proxy, and Serve keeps to what it was started with.
    serve.shutdown()
    with SecondNode(ray_head):
        deployed = deploy_vllm(
            cache={
                "share": "on",
                "staging_mib": 4,
                # Replicas that have computed here load from S3 nevertheless.
                "load_when": "always",
                "remote": {"uri": s3_uri(s3), "admission": "always"},
            },
            http={"proxy_location": "HeadOnly"},
            placement={"max_replicas_per_node": 1},
        )
        try:
            yield SharingCluster(deployed, replicas=2)
        finally:
            deployed.delete()
            end_caches(deployed.config.name)


def test_a_prefix_that_one_node_computed_is_loaded_by_another(two_nodes: SharingCluster) -> None:
    here, there = two_nodes.nodes
    cold = two_nodes.compute(two_nodes.replica_on(here), words("peer"))
    two_nodes.wait_kept(words("peer"), "dram", "remote")
    two_nodes.load(two_nodes.replica_on(there), words("peer"), "peer", cold, BYTES_PER_TOKEN)


@pytest.fixture(scope="module")
def in_s3(two_nodes: SharingCluster, s3: S3Server) -> dict[str, Answer]:
    """What the first node computed and is nowhere else: the caches of both nodes were killed."""
    here = two_nodes.nodes[0]
    answers = {
        name: two_nodes.compute(two_nodes.replica_on(here), words(name)) for name in ("hangs", "dies", "s3")
    }
    for name in answers:
        keys = two_nodes.wait_kept(words(name), "remote")
        assert {path.name for path in s3.bucket.rglob("*.kv")} >= {f"{key}.0.kv" for key in keys}
    for node in two_nodes.nodes:
        two_nodes.kill_cache(node)
    return answers


def test_a_cache_that_hangs_for_ten_seconds_amid_a_load_costs_that_load_its_limit_and_others_nothing(
    two_nodes: SharingCluster, s3: S3Server, in_s3: dict[str, Answer]
) -> None:
    there = two_nodes.nodes[1]
    replica, pid = two_nodes.replica_on(there), two_nodes.pid(there)
    failures = two_nodes.load_failures(replica)
    with two_nodes.held_up(replica, words("hangs"), s3) as asking:
        begun = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            other = two_nodes.ask(words("meanwhile"))
            assert (other.replica, other.loaded) == (replica, 0)
            assert not asking.done()
            s3.resume()
            answer = asking.result(timeout=60)
            # The load's limit is as long, but began before.
            time.sleep(max(0.0, begun + HANG_S - time.monotonic()))
        finally:
            os.kill(pid, signal.SIGCONT)
    assert (answer.tokens, answer.loaded, answer.replica) == (in_s3["hangs"].tokens, 0, replica)
    assert two_nodes.load_failures(replica) - failures == {"late": 1}
    two_nodes.wait_connected(there)
    two_nodes.check_rest()


def test_a_cache_that_is_killed_amid_a_load_costs_no_answer(
    two_nodes: SharingCluster, s3: S3Server, in_s3: dict[str, Answer]
) -> None:
    there = two_nodes.nodes[1]
    replica, pid = two_nodes.replica_on(there), two_nodes.pid(there)
    wait_for("S3 works again for it", lambda: two_nodes.tier_works(there, "remote"), 60)
    failures = two_nodes.load_failures(replica)
    with two_nodes.held_up(replica, words("dies"), s3) as asking:
        os.kill(pid, signal.SIGKILL)
        # While S3 still gives no answer.
        answer = asking.result(timeout=60)
    assert (answer.tokens, answer.loaded, answer.replica) == (in_s3["dies"].tokens, 0, replica)
    assert two_nodes.load_failures(replica) - failures == {"unavailable": 1}
    two_nodes.wait_replaced(there, pid)
    two_nodes.check_rest()


def test_after_the_caches_of_all_nodes_were_killed_it_comes_from_s3(
    two_nodes: SharingCluster, in_s3: dict[str, Answer]
) -> None:
    there = two_nodes.nodes[1]
    two_nodes.load(two_nodes.replica_on(there), words("s3"), "remote", in_s3["s3"], BYTES_PER_TOKEN)
