"""Real vLLM under Serve, with a tiny model: two replicas of a core each, two tenants, two LoRA adapters.

The KV of a replica is so small that the tests' own traffic evicts blocks all the time.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple

import httpx
import openai
import psutil
import pytest

from cache_store.events import ChunkKey, FrameReader, Hello, Snapshot, unpack_keys
from cache_store.keys import chunk_keys, namespace
from cluster.secret import cluster_secret
from router import decision_log
from router.tenants import salt
from tests.cluster.deployed import Deployed, wait_for
from tests.tiny_adapter import make_tiny_adapter
from tests.tiny_model import VOCAB
from workers.messages import SNAPSHOT_PATH

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(300)]

BLOCK, CHUNK, CONTEXT = 32, 64, 8192
KV_TOKENS = 9 * 1024
KV_BYTES_PER_TOKEN = 512


@pytest.fixture(scope="module")
def cluster(deploy_vllm: Callable[..., Deployed], tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    folder = tmp_path_factory.mktemp("adapters")
    adapters = {
        name: str(make_tiny_adapter(folder / name, seed)) for seed, name in enumerate(("kind", "terse"))
    }
    args = {
        "max-model-len": CONTEXT,
        "kv-cache-memory-bytes": KV_TOKENS * KV_BYTES_PER_TOKEN,
        "max-loras": 2,
        "max-lora-rank": 8,
        # A random model would fill an answer with the blanks that a grammar allows.
        "structured-outputs-config": {"disable_any_whitespace": True, "backend": "xgrammar"},
    }
    cluster = deploy_vllm(
        model={"adapters": adapters},
        engine={"args": args, "stuck_after_s": 5},
        router={"tenants": {"a": {"api_keys": ["key-a"]}, "b": {"api_keys": ["key-b"]}}},
    )
    cluster.http.headers["authorization"] = "Bearer key-a"
    cluster.ready_replicas(2)
    return cluster


@pytest.fixture
def client(cluster: Deployed) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="key-a", max_retries=0)


@pytest.fixture
def words(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Token ids that no other test asks for."""
    random = Random(request.node.name)
    return lambda count: [random.randrange(3, VOCAB) for _ in range(count)]


class Served(NamedTuple):
    """One answer, and what was expected of it when its replica was chosen."""

    text: str
    replica: str
    prompt_tokens: int
    cached: int
    matched: int


def complete(cluster: Deployed, prompt: Any, tenant: str = "a", **body: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0} | body
    headers = {"authorization": f"Bearer key-{tenant}", "x-request-id": uuid.uuid4().hex}
    return cluster.http.post("/v1/completions", json=body, headers=headers)


def served(cluster: Deployed, prompt: Any, tenant: str = "a", **body: Any) -> Served:
    answer = complete(cluster, prompt, tenant, **body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    request_id = answer.request.headers["x-request-id"]
    decisions = decision_log.load(io.BytesIO(cluster.decisions()))
    choice = next(d.choice for d in reversed(decisions) if d.request.request_id == request_id)
    assert choice is not None
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert answer.headers["x-manta-cached"] == f"hbm={cached},computed={usage['prompt_tokens'] - cached}"
    return Served(
        answer.json()["choices"][0]["text"],
        answer.headers["x-manta-replica"],
        usage["prompt_tokens"],
        cached,
        choice.matched_tokens,
    )


def snapshot(cluster: Deployed, replica: dict[str, Any]) -> tuple[Hello, set[ChunkKey]]:
    """What the replica says that it holds, now."""
    frames = list(FrameReader().feed(cluster.ask_replica(replica, "GET", SNAPSHOT_PATH).content))
    hello, tiers = frames[0], frames[1:]
    assert isinstance(hello, Hello)
    return hello, {key for tier in tiers if isinstance(tier, Snapshot) for key in unpack_keys(tier.keys)}


def keys_of(hello: Hello, tokens: Sequence[int], adapter: str = "", tenant: str = "a") -> list[ChunkKey]:
    start = namespace(hello.identity, adapter, salt(tenant, None, cluster_secret()))
    return chunk_keys(start, tokens, hello.chunk_tokens)


def settle(cluster: Deployed, replica_id: str, prompt: Sequence[int], **whose: str) -> set[ChunkKey]:
    """Wait until replica and router know of `prompt`, and so of all evictions that made room for it."""

    def known() -> set[ChunkKey] | None:
        replica = next(r for r in cluster.replicas() if r["id"] == replica_id)
        hello, held = snapshot(cluster, replica)
        complete = set(keys_of(hello, prompt, **whose)) <= held and len(held) == replica["chunks"]
        return held if complete else None

    held = wait_for("the prompt's chunks in the index", known) if len(prompt) >= CHUNK else set()
    cluster.wait_idle()
    return held


def check_promise(answer: Served) -> None:
    """What the index says is what vLLM finds, in whole chunks.

    The one difference: vLLM computes a prompt's last token anew in any case, and with it the block that holds it. A
    prompt that is there to its end therefore matches up to one block more than vLLM finds.
    """
    found_at_most = (answer.prompt_tokens - 1) // BLOCK * BLOCK
    assert min(answer.matched, found_at_most) <= answer.cached, answer
    assert answer.cached - answer.matched < CHUNK, answer


# The index.


def test_a_fresh_request_for_a_resident_prefix_is_matched(
    cluster: Deployed, words: Callable[[int], list[int]]
) -> None:
    shared = words(640)
    first = served(cluster, shared + words(10))
    assert (first.cached, first.matched) == (0, 0)
    settle(cluster, first.replica, shared)
    for tail in (words(10), words(100), []):
        again = served(cluster, shared + tail)
        assert again.replica == first.replica
        assert again.matched == 640
        assert again.cached == (640 if tail else 640 - BLOCK)


def test_the_index_promises_what_vllm_holds_while_blocks_are_evicted(
    cluster: Deployed, words: Callable[[int], list[int]]
) -> None:
    random = Random(11)
    stems = [words(1400) for _ in range(32)]
    asked: set[ChunkKey] = set()
    hits = losses = 0
    longest: dict[tuple[str, int], int] = {}
    for _ in range(120):
        number = min(random.randrange(len(stems)), random.randrange(len(stems)))
        length = random.randrange(6, 20) * CHUNK + random.choice((1, 5, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK))
        prompt = stems[number][:length] + words(random.choice((0, 0, 1, 90)))
        answer = served(cluster, prompt)
        check_promise(answer)
        hits += answer.matched > 0
        before = longest.get((answer.replica, number), 0)
        losses += min(before, length) // CHUNK * CHUNK > answer.cached + BLOCK
        longest[answer.replica, number] = max(before, length)
        asked |= settle(cluster, answer.replica, prompt)
    assert hits > 10
    assert losses > 3, "nothing was evicted: the test has shown nothing"
    assert len(asked) > 2 * KV_TOKENS // CHUNK


def test_the_index_is_exact_again_after_a_storm(cluster: Deployed, words: Callable[[int], list[int]]) -> None:
    random = Random(12)
    stems = [words(1400) for _ in range(12)]
    prompts = [random.choice(stems)[: random.randrange(40, 1400)] + words(3) for _ in range(120)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda prompt: complete(cluster, prompt, max_tokens=20), prompts))
    assert [answer.status_code for answer in answers] == [200] * len(prompts)
    for replica in cluster.replicas():
        # Once this is known of a replica, so is all that happened in it before.
        fence = words(2 * CHUNK)
        body = {"model": "tiny", "prompt": fence, "max_tokens": 1}
        assert cluster.ask_replica(replica, "POST", "/v1/completions", json=body).status_code == 200
        settle(cluster, replica["id"], fence, tenant="")

    def exact() -> bool:
        replicas = cluster.replicas()
        return all(r["running"] == 0 and len(snapshot(cluster, r)[1]) == r["chunks"] for r in replicas)

    wait_for("index and replicas agree", exact)
    hits = 0
    for stem in stems:
        answer = served(cluster, stem)
        check_promise(answer)
        hits += answer.matched > 0
        settle(cluster, answer.replica, stem)
    assert hits > 0


# Adapters.


def test_adapters_have_public_names_outside_and_their_contents_inside(
    cluster: Deployed, client: openai.OpenAI, words: Callable[[int], list[int]]
) -> None:
    assert {model.id for model in client.models.list()} == {"tiny", "kind", "terse"}
    infos = cluster.handle().describe.remote().result(timeout_s=30)
    names = infos[0]["adapters"]
    assert {public: name.split("@")[0] for public, name in names.items()} == {
        "kind": "kind",
        "terse": "terse",
    }
    assert all(len(name.split("@")[1]) == 32 for name in names.values())

    prompt = words(200)
    for public, name in names.items():
        answer = complete(cluster, prompt, model=public)
        assert answer.json()["model"] == public
        # The engine's events named the adapter as it is inside: else other keys would stand here.
        settle(cluster, answer.headers["x-manta-replica"], prompt, adapter=name)
    chat = client.chat.completions.create(
        model="kind", messages=[{"role": "user", "content": "hello"}], max_tokens=4
    )
    assert chat.model == "kind"
    assert complete(cluster, prompt, model=names["kind"]).status_code == 404


def test_an_adapter_says_something_else_and_hits_its_own_kv_alone(
    cluster: Deployed, words: Callable[[int], list[int]]
) -> None:
    prompt = words(400)
    first = {
        model: served(cluster, prompt, model=model, max_tokens=16) for model in ("tiny", "kind", "terse")
    }
    assert [(answer.cached, answer.matched) for answer in first.values()] == [(0, 0)] * 3
    assert len({answer.text for answer in first.values()}) == 3
    names = {"tiny": ""} | cluster.handle().describe.remote().result(timeout_s=30)[0]["adapters"]
    for model, answer in first.items():
        settle(cluster, answer.replica, prompt, adapter=names[model])
    for model, answer in first.items():
        again = served(cluster, prompt, model=model, max_tokens=16)
        assert (again.replica, again.text) == (answer.replica, answer.text)
        assert (again.matched, again.cached) == (384, 384)


# Tenants.


def test_tenants_never_share_kv_and_keep_their_own(
    cluster: Deployed, words: Callable[[int], list[int]]
) -> None:
    prompt = words(400)
    theirs = served(cluster, prompt, tenant="a")
    settle(cluster, theirs.replica, prompt, tenant="a")
    other = served(cluster, prompt, tenant="b")
    assert (other.cached, other.matched) == (0, 0)
    settle(cluster, other.replica, prompt, tenant="b")
    for tenant in ("a", "b"):
        again = served(cluster, prompt, tenant=tenant)
        assert (again.cached, again.matched) == (384, 384)
    assert other.text == theirs.text


def test_a_salt_of_the_clients_separates_inside_its_tenant_and_opens_no_other(
    cluster: Deployed, words: Callable[[int], list[int]]
) -> None:
    prompt = words(400)
    theirs = served(cluster, prompt, tenant="a", cache_salt="mine")
    assert theirs.cached == 0
    wait_for("its own prefix", lambda: served(cluster, prompt, tenant="a", cache_salt="mine").cached == 384)
    guesses = ("mine", salt("a", None, cluster_secret()), salt("a", "mine", cluster_secret()))
    others = [served(cluster, prompt, tenant="b", cache_salt=guess) for guess in guesses]
    assert theirs.replica in {answer.replica for answer in others}
    assert [(answer.cached, answer.matched) for answer in others] == [(0, 0)] * 3


def test_kv_transfer_parameters_of_a_client_are_refused(cluster: Deployed) -> None:
    for parameters in ({"do_remote_decode": True}, {"prompt_token_ids": [1, 2, 3]}):
        answer = complete(cluster, "hello", kv_transfer_params=parameters)
        assert answer.status_code == 400, answer.text
        assert "kv_transfer_params" in answer.json()["error"]["message"]


# Clients that leave.


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
def test_a_client_that_leaves_stops_vllm_within_a_second(cluster: Deployed, stream: bool) -> None:
    body = {"model": "tiny", "prompt": "never stop", "max_tokens": 8000, "ignore_eos": True, "stream": stream}
    cores = [engine_core(pid) for pid in cluster.pids("unified").values()]

    def busy() -> int:
        return sum(r["running"] + r["waiting"] for r in cluster.replicas())

    def computing() -> bool:
        return any(core.cpu_percent(interval=0.1) > 30 for core in cores)

    wait_for("idle engines", lambda: busy() == 0)
    with socket.create_connection(("127.0.0.1", cluster.config.http.port)) as client:
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: manta\r\nauthorization: Bearer key-a\r\n"
        head += (
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\nexpect: 100-continue\r\n\r\n"
        )
        # Head and body apart, as client libraries may send them: HAProxy then has a path of its own for the body.
        client.sendall(head.encode())
        assert client.recv(1024).startswith(b"HTTP/1.1 100 ")
        client.sendall(data)
        wait_for("a busy engine", lambda: busy() == 1 and computing())
    wait_for("idle engines", lambda: busy() == 0 and not computing(), 2.0)


# What vLLM's server offers, through the router.


def test_every_form_of_a_prompt_is_answered_as_vllm_does(
    cluster: Deployed, words: Callable[[int], list[int]]
) -> None:
    ids = words(90)
    for prompt in ("one text", ["one text", "and another"], ids, [ids, words(5)]):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0}
        ours = cluster.http.post("/v1/completions", json=body)
        direct = cluster.ask_replica(cluster.replicas()[0], "POST", "/v1/completions", json=body).json()
        assert ours.status_code == 200, ours.text
        assert [c["text"] for c in ours.json()["choices"]] == [c["text"] for c in direct["choices"]]
        assert ours.json()["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]


def test_a_text_survives_tokenize_and_detokenize(cluster: Deployed) -> None:
    text = "Tokens, blocks and chunks: é 日本"
    tokens = cluster.http.post("/tokenize", json={"model": "tiny", "prompt": text}).json()["tokens"]
    back = cluster.http.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()["prompt"]
    assert back == text
    assert complete(cluster, tokens).json()["usage"]["prompt_tokens"] == len(tokens)


def test_sampled_choices_repeat_with_their_seed(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt="choose", max_tokens=8, n=2, temperature=1.0, seed=seed
        )
        return [choice.text for choice in answer.choices]

    one = texts(1)
    assert len(one) == 2
    assert one[0] != one[1]
    assert texts(1) == one
    assert texts(2) != one


def test_a_stop_word_ends_an_answer(client: openai.OpenAI) -> None:
    whole = (
        client.completions.create(model="tiny", prompt="go on", max_tokens=24, temperature=0).choices[0].text
    )
    stop = next(char for char in whole[4:] if char.isascii() and char not in whole[:4])
    cut = client.completions.create(model="tiny", prompt="go on", max_tokens=24, temperature=0, stop=[stop])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_log_probabilities_come_with_every_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=3,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 3
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in logprobs.content)


def test_an_answer_keeps_to_a_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}, "sure": {"type": "boolean"}},
        "required": ["city", "sure"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "where?"}],
        max_tokens=120,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}},
    )
    place = json.loads(answer.choices[0].message.content or "")
    assert place["city"] in ("Paris", "Oslo")
    assert place["sure"] in (True, False)


def test_a_chat_without_messages_is_refused(cluster: Deployed) -> None:
    answer = cluster.http.post("/v1/chat/completions", json={"model": "tiny", "messages": []})
    assert answer.status_code == 400
    assert "messages" in json.dumps(answer.json()["error"])


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(
    cluster: Deployed, words: Callable[[int], list[int]]
) -> None:
    text = "seven " * CONTEXT
    bodies = {
        "/v1/completions": ({"prompt": text}, {"prompt": words(CONTEXT + 9)}),
        "/v1/chat/completions": ({"messages": [{"role": "user", "content": text}]},),
    }
    for path, forms in bodies.items():
        for form in forms:
            answer = cluster.http.post(path, json={"model": "tiny", "max_tokens": 1, **form})
            assert answer.status_code == 400
            # vLLM stops counting a text one token past the limit, and says "at least".
            numbers = {int(number) for number in re.findall(r"\d+", answer.json()["error"]["message"])}
            assert CONTEXT in numbers
            assert max(numbers) > CONTEXT


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(model="gpt-9", prompt="hello")


# Processes. These tests replace replicas: they come last.


def engine_core(pid: int) -> psutil.Process:
    """The engine's own process, a child of its replica's."""

    def find() -> psutil.Process | None:
        for child in psutil.Process(pid).children(recursive=True):
            # Others come and go. The kernel keeps fifteen letters of a name.
            with suppress(psutil.NoSuchProcess):
                if child.name().startswith("VLLM::EngineCor"):
                    return child
        return None

    return wait_for(f"an engine's process below {pid}", find)


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def cores_of(cluster: Deployed) -> list[set[int]]:
    """Per replica, where the threads of its engine may run. Fails for one that is bound elsewhere."""
    found = []
    for pid in cluster.pids("unified").values():
        core = engine_core(pid)
        cores = {int(number) for number in core.environ()["VLLM_CPU_OMP_THREADS_BIND"].split(",")}
        assert all(os.sched_getaffinity(thread.id) == cores for thread in core.threads())
        found.append(cores)
    return found


def test_every_replica_has_a_core_to_itself(cluster: Deployed) -> None:
    first, second = cores_of(cluster)
    assert len(first) == len(second) == 1
    assert first != second


def replaced(cluster: Deployed, sick: str) -> None:
    wait_for("the sick replica gone", lambda: sick not in cluster.pids("unified"), 120)
    cluster.ready_replicas(2)


def test_a_replica_whose_engine_died_is_replaced_unseen(
    cluster: Deployed, words: Callable[[int], list[int]]
) -> None:
    sick, pid = next(iter(cluster.pids("unified").items()))
    replica = psutil.Process(pid)
    done = threading.Event()

    def keep_asking() -> list[int]:
        statuses = []
        while not done.is_set():
            statuses.append(complete(cluster, words(100)).status_code)
        return statuses

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(keep_asking)
        try:
            engine_core(pid).kill()
            replaced(cluster, sick)
        finally:
            done.set()
        statuses = asking.result(timeout=60)
    assert len(statuses) > 10
    assert set(statuses) == {200}
    assert not alive(replica)
    assert len({frozenset(cores) for cores in cores_of(cluster)}) == 2


def test_a_replica_whose_engine_is_stuck_is_replaced_and_leaves_no_process(
    cluster: Deployed, words: Callable[[int], list[int]]
) -> None:
    sick, pid = next(iter(cluster.pids("unified").items()))
    replica = psutil.Process(pid)
    processes = [replica, *replica.children(recursive=True)]
    os.kill(engine_core(pid).pid, signal.SIGSTOP)
    with ThreadPoolExecutor(4) as pool:
        # Some of these wait for the stuck engine until it is given up.
        answers = list(pool.map(lambda _: complete(cluster, words(100)), range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert not any(sick in answer.headers["x-manta-replica"] for answer in answers)
    replaced(cluster, sick)
    wait_for("its processes gone", lambda: not any(alive(process) for process in processes))
    assert len({frozenset(cores) for cores in cores_of(cluster)}) == 2


def test_an_engine_does_not_outlive_a_replica_that_is_killed(cluster: Deployed) -> None:
    victim, pid = next(iter(cluster.pids("unified").items()))
    core = engine_core(pid)
    os.kill(core.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    wait_for("the engine gone", lambda: not alive(core), 10)
    replaced(cluster, victim)
