"""KV that an engine on one host computed, loaded by an engine on another: two vLLM replicas under `ray up`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from router.headers import parse_cached
from tests.cluster.conftest import CPU_ENGINE
from tests.cluster.deployed import merged
from tests.hosts.cache_addresses import PREFIX
from tests.hosts.lab import REPOSITORY, Lab, why_not
from tests.hosts.ray_up_hosts import ENVIRONMENT, SHARED, RayUpHosts, wait_for
from tests.published_addresses import host_of
from tests.tiny_model import VOCAB, make_tiny_model

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1200)]

BLOCK, CHUNK, CHUNKS = 32, 64, 23
WHOLE = CHUNK * CHUNKS
TOKENS = 24
HERE, THERE = "a", "b"
CACHE_ADDRESSES = f"python {REPOSITORY}/tests/hosts/cache_addresses.py pair"


def sharing(model: Path) -> dict[str, Any]:
    """A float32 engine on each host, which loads from others whatever there is."""
    pool = {"role": "unified", "replicas": 2, "drain_timeout_s": 10, "resources": {"cores": 1}}
    sections = {
        "name": "pair",
        "model": {"path": str(model), "name": "tiny"},
        "engine": merged(CPU_ENGINE, {"args": {"max-model-len": 2048, "block-size": BLOCK}}),
        "cache": {"chunk_tokens": CHUNK, "share": "on", "load_when": "always", "staging_mib": 4},
        "pools": [pool],
        "placement": {"max_replicas_per_node": 1},
    }
    return merged(SHARED, sections)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayUpHosts]:
    """Two hosts with a replica each, which the router knows as ready, and their caches."""
    if reason := why_not():
        pytest.skip(reason)
    model = make_tiny_model(tmp_path_factory.mktemp("tiny-model") / "tiny")
    config = sharing(model)
    with Lab(visible=[model], environment=ENVIRONMENT) as lab:
        hosts = RayUpHosts(lab, {HERE: ["router", "unified"], THERE: ["unified"]})
        hosts.up(config)
        hosts.deploy(config)
        hosts.wait_ready(2, 480)
        wait_for("both caches", lambda: len(hosts.admin("/admin/cache/stats")["nodes"]) == 2, 120)
        yield hosts


def words(name: str) -> list[int]:
    """A prompt that begins like no other: whole chunks, and a few tokens."""
    random = Random(name)
    return [random.randrange(3, VOCAB) for _ in range(WHOLE + 6)]


def complete(pair: RayUpHosts, prompt: list[int]) -> tuple[list[int], dict[str, int], str]:
    """Greedy tokens, prompt tokens by where their KV came from, and who answered."""
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True,
        "ignore_eos": True,
    }  # fmt: skip
    answer = pair.ask("/v1/completions", body)
    assert answer.status == 200, answer.text
    tokens = answer.json["choices"][0]["token_ids"]
    assert len(tokens) == TOKENS
    return tokens, parse_cached(answer.headers["x-manta-cached"]), answer.headers["x-manta-replica"]


def kept(pair: RayUpHosts, prompt: list[int]) -> bool:
    """Whether some node has every whole chunk of the prompt in memory."""
    engines = pair.admin("/admin/cache/lookup", {"prompt": prompt, "model": "tiny", "tenant": "team"})[
        "engines"
    ]
    return bool(engines) and all(chunk["dram"] for chunk in engines[0]["chunks"])


def test_a_prefix_computed_on_one_host_is_loaded_on_another(pair: RayUpHosts) -> None:
    replica = {
        host: next(
            each["id"]
            for each in pair.wait_ready(2)
            if each["address"].startswith(f"{pair.workers[host].address}:")
        )
        for host in (HERE, THERE)
    }
    prompt = words("shared")

    pair.drain(replica[THERE])
    cold, cached, by = complete(pair, prompt)
    assert (by, cached["computed"]) == (replica[HERE], len(prompt))
    wait_for("its chunks in memory", lambda: kept(pair, prompt), 120)
    pair.drain(replica[THERE], "--undo")
    pair.wait_ready(2)

    pair.drain(pair.workers[HERE].address)
    loaded, cached, by = complete(pair, prompt)
    assert by == replica[THERE]
    assert loaded == cold
    assert cached["peer"] + cached["dram"] == WHOLE
    assert cached["computed"] == len(prompt) - WHOLE


def test_caches_tell_addresses_of_their_hosts(pair: RayUpHosts) -> None:
    said = pair.exec(CACHE_ADDRESSES).splitlines()
    found = [host_of(line.split()[1]) for line in said if line.startswith(PREFIX)]
    assert len(found) == 2
    assert set(found) == {host.address for host in pair.workers.values()}


def test_a_chat_is_answered_by_the_pair(pair: RayUpHosts) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    answer = pair.ask("/v1/chat/completions", body)
    assert answer.status == 200, answer.text
    assert answer.json["usage"]["completion_tokens"] == 8
