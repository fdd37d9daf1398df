"""KV saved and loaded by real engines: the same tokens as computed, from where they say, and nothing left behind.

Two engines share a store: a plain one, and one that guesses tokens ahead. What is asked of a store that fails, is slow
or lies is asked of the second, whose own blocks are forgotten before.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from cache_store.chunk import checksum
from cache_store.config import CacheConfig
from cache_store.events import ChunkKey
from cache_store.keys import chunk_keys, namespace
from cache_store.node_store import LoadResult
from tests.engine.store_thread import StoreThread
from tests.tiny_adapter import make_tiny_adapter
from tests.tiny_model import make_tiny_model
from workers.config import EngineConfig, ModelConfig
from workers.messages import Plan
from workers.request_record import RequestRecord, current_request
from workers.store_address import StoreAddress
from workers.vllm.connector.shareable import NotShareableError
from workers.vllm.engine import VllmEngine

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

BLOCK, CHUNK = 32, 64
ARGS = {
    "max-model-len": 1024,
    "dtype": "float32",
    "block-size": BLOCK,
    "enforce-eager": True,
    "kv-cache-memory-bytes": 64 * 1024 * 1024,
    "distributed-executor-backend": "uni",
    # Prompts of several chunks are computed in several steps.
    "max-num-batched-tokens": 128,
    "max-num-seqs": 16,
}
GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PROMPT = [(7 * at + at * at // 5) % 400 + 3 for at in range(450)]
"""Seven whole chunks and two tokens."""


@dataclass
class Answer:
    tokens: list[int]
    cached: dict[str, int]
    """By tier, as the header says."""
    usage: dict[str, Any]


@dataclass
class Served:
    """An engine, and its server without a network."""

    engine: VllmEngine
    client: httpx.AsyncClient
    store: StoreThread

    async def complete(
        self,
        prompt: list[int],
        max_tokens: int = 24,
        salt: str = "",
        plan: Plan | None = None,
        **options: Any,
    ) -> Answer:
        record = RequestRecord("test", salt=salt, plan=plan)
        token = current_request.set(record)
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        try:
            answer = await self.client.post("/v1/completions", json=body | options)
        finally:
            current_request.reset(token)
        assert answer.status_code == 200, answer.text
        content = answer.json()
        cached = {name: int(count) for name, count in (p.split("=") for p in record.cached_header.split(","))}
        assert sum(cached.values()) == len(prompt)
        assert content["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - cached["computed"]
        return Answer(content["choices"][0]["token_ids"], cached, content["usage"])

    async def ask_until(self, gone: asyncio.Event, prompt: list[int]) -> None:
        """As a client that leaves."""
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}).encode()
        sent = iter([{"type": "http.request", "body": body}])

        async def receive() -> dict[str, Any]:
            for message in sent:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            assert gone.is_set(), "nothing was computed yet"

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "client": None, "server": ("engine", 80),
        }  # fmt: skip
        await self.engine.app(scope, receive, send)

    def keys(self, tokens: list[int], adapter: str = "", salt: str = "") -> list[ChunkKey]:
        return chunk_keys(namespace(self.engine.info.identity.digest(), adapter, salt), tokens, CHUNK)

    async def metrics(self) -> dict[str, float]:
        page = (await self.client.get("/metrics")).text
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    async def metric(self, name: str, *labels: str) -> float:
        return sum(
            value
            for full, value in (await self.metrics()).items()
            if full.partition("{")[0] == name and all(label in full for label in labels)
        )

    async def forget(self) -> None:
        """The engine's own blocks hold no prefix any more."""
        await self.at_rest()
        assert await self.engine._llm.reset_prefix_cache()

    async def saved(self, tokens: list[int], **names: str) -> None:
        """All whole chunks of `tokens` are in the store."""
        keys = set(self.keys(tokens, **names))
        await eventually(lambda: keys <= self.store.keys)

    async def at_rest(self) -> None:
        """No block is in use, no request of a worker open, no lease left."""

        async def resting() -> bool:
            stats = self.store.call(self.store.server.stats)
            leases = self.store.call(self.store.store.stats).leases
            return not (await self.metric("vllm:kv_cache_usage_perc") or stats.open_requests or leases)

        async with asyncio.timeout(30):
            while not await resting():  # noqa: ASYNC110 - known by asking alone
                await asyncio.sleep(0.02)


async def eventually(what: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not what():  # noqa: ASYNC110 - the condition is of plain data, with no event to wait for
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(
    model: Path, store: StoreThread, adapters: dict[str, str] | None = None, share: Any = "on", **args: Any
) -> AsyncIterator[Served]:
    engine = VllmEngine(
        EngineConfig(kind="vllm", device="cpu", args={**ARGS, **args}),
        ModelConfig(path=str(model), name="tiny", adapters=adapters or {}),
        CacheConfig(chunk_tokens=CHUNK, share=share, staging_mib=1),
        store=StoreAddress(str(store.socket), "engine", load_when="always"),
    )
    try:
        await engine.start(lambda events: None)
        transport = httpx.ASGITransport(engine.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=120) as client:
            yield Served(engine, client, store)
    finally:
        await engine.shutdown()


@pytest.fixture(scope="module")
def store() -> Iterator[StoreThread]:
    store = StoreThread(CHUNK)
    yield store
    store.check()
    store.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def first(
    vllm_environment: None, tiny_model: Path, store: StoreThread, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("first")
    adapters = {"shared": folder.parent / "shared", "style": make_tiny_adapter(folder / "style", 1)}
    make_tiny_adapter(adapters["shared"], 7)
    names = {name: str(path) for name, path in adapters.items()}
    async with serving(tiny_model, store, names) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second(
    first: Served, tiny_model: Path, store: StoreThread, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    folder = tmp_path_factory.mktemp("second")
    adapters = {
        "shared": make_tiny_adapter(folder / "shared", 7),
        "style": make_tiny_adapter(folder / "style", 2),
    }
    names = {name: str(path) for name, path in adapters.items()}
    async with serving(tiny_model, store, names, **{"speculative-config": GUESSING}) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def cold(first: Served, second: Served, store: StoreThread) -> Answer:
    """The prompt computed by the first engine; its chunks are in the store, and the second engine knows nothing."""
    await first.forget()
    store.clear()
    answer = await first.complete(PROMPT)
    assert answer.cached["computed"] == len(PROMPT)
    await first.saved(PROMPT)
    await second.forget()
    return answer


def lie_once(
    store: StoreThread, key: ChunkKey, change: Callable[[LoadResult, memoryview], LoadResult]
) -> None:
    """The store changes what it answers to the first load of one chunk. (Loads of a request end in any order.)"""
    load_into, lies = store.store.load_into, [change]

    async def changed(asked: ChunkKey, rank: int, target: memoryview, limit_s: float) -> LoadResult:
        result = await load_into(asked, rank, target, limit_s)
        return lies.pop()(result, target) if asked == key and lies else result

    store.store.load_into = changed  # type: ignore[method-assign]


@pytest.fixture
def honest(store: StoreThread) -> Iterator[None]:
    """After the test the store is itself again."""
    yield
    store.store.__dict__.pop("load_into", None)


async def test_a_second_engine_answers_from_the_first_one_s_kv(second: Served, cold: Answer) -> None:
    before = await second.metrics()
    answer = await second.complete(PROMPT)
    after = await second.metrics()
    assert answer.tokens == cold.tokens
    assert answer.cached == {"hbm": 0, "dram": 448, "peer": 0, "disk": 0, "remote": 0, "computed": 2}

    def grown(name: str) -> float:
        return sum(value - before.get(full, 0) for full, value in after.items() if full.startswith(name))

    assert grown('manta_kv_loaded_tokens_total{engine="0",model_name="tiny",tier="dram"') == 448
    assert (
        grown('manta_kv_loaded_bytes_total{engine="0",model_name="tiny",tier="dram"')
        == 7 * CHUNK * 2 * 64 * 4
    )
    assert grown("manta_kv_load_failures_total") == 0
    await second.at_rest()
    again = await second.complete(PROMPT)
    assert (again.tokens, again.cached["hbm"]) == (cold.tokens, 448)


async def test_a_whole_prompt_that_is_there_leaves_a_token_to_compute(
    first: Served, second: Served, cold: Answer
) -> None:
    whole = PROMPT[:448]
    expected = await first.complete(whole)
    answer = await second.complete(whole)
    assert answer.tokens == expected.tokens
    assert (answer.cached["dram"], answer.cached["computed"]) == (448 - BLOCK, BLOCK)


async def test_an_own_hit_that_ends_inside_a_chunk_is_completed_from_the_store(
    first: Served, second: Served, cold: Answer, store: StoreThread
) -> None:
    kept = set(first.keys(PROMPT))
    store.clear()
    await second.complete(PROMPT[: 3 * BLOCK + 1], max_tokens=1)
    await first.forget()
    await first.complete(PROMPT)
    await eventually(lambda: kept <= store.keys)
    answer = await second.complete(PROMPT)
    assert answer.tokens == cold.tokens
    assert (answer.cached["hbm"], answer.cached["dram"]) == (3 * BLOCK, 448 - 3 * BLOCK)


async def test_what_was_generated_is_shared_when_it_is_settled(
    first: Served, second: Served, cold: Answer
) -> None:
    """The second engine guesses ahead: of its guesses that were not taken nothing may be saved."""
    answer = await second.complete(PROMPT, max_tokens=200)
    assert await second.metric("vllm:spec_decode_num_draft_tokens_total") > 0
    # The last token was sampled and never computed.
    tokens = [*PROMPT, *answer.tokens]
    await second.saved(tokens[:-1])
    await second.at_rest()
    assert second.store.keys == set(second.keys(tokens[:-1]))
    await first.forget()
    more = await first.complete(tokens, max_tokens=8)
    assert more.cached["dram"] == len(tokens[:-1]) // CHUNK * CHUNK
    longer = await second.complete(PROMPT, max_tokens=208)
    assert longer.tokens == answer.tokens + more.tokens


@pytest.mark.parametrize("after", [0, 3])
async def test_a_flipped_bit_is_computed_again(
    second: Served, cold: Answer, store: StoreThread, honest: None, after: int
) -> None:
    def flip(result: LoadResult, target: memoryview) -> LoadResult:
        target[100] ^= 1
        return result

    lie_once(store, second.keys(PROMPT)[after], flip)
    before = await second.metric("manta_kv_load_failures_total", 'reason="checksum"')
    answer = await second.complete(PROMPT)
    assert answer.tokens == cold.tokens
    assert answer.cached == {
        "hbm": 0, "dram": after * CHUNK, "peer": 0, "disk": 0, "remote": 0, "computed": 450 - after * CHUNK
    }  # fmt: skip
    assert await second.metric("manta_kv_load_failures_total", 'reason="checksum"') == before + 1
    assert store.call(store.store.stats).counters.corrupt["dram"] > 0
    await second.at_rest()


async def test_a_byte_that_is_changed_behind_the_checksum_s_back_shows_in_the_answer(
    second: Served, cold: Answer, store: StoreThread, honest: None
) -> None:
    """What all the equalities here would say of a copy that goes wrong by a byte."""

    def forge(result: LoadResult, target: memoryview) -> LoadResult:
        assert result.header is not None
        # The exponent of a number in the first block.
        target[3] ^= 0x40
        forged = msgspec.structs.replace(result.header, checksum=checksum(target[: result.header.nbytes]))
        return result._replace(header=forged)

    lie_once(store, second.keys(PROMPT)[0], forge)
    answer = await second.complete(PROMPT)
    assert answer.cached["dram"] == 448
    assert answer.tokens != cold.tokens


async def test_a_chunk_that_is_gone_between_look_up_and_load_is_computed(
    second: Served, cold: Answer, store: StoreThread, honest: None
) -> None:
    gone = LoadResult("missing", 0, None)
    lie_once(store, second.keys(PROMPT)[1], lambda result, target: gone)
    answer = await second.complete(PROMPT)
    assert answer.tokens == cold.tokens
    assert answer.cached["dram"] == CHUNK
    await second.at_rest()


async def test_a_silent_store_costs_a_second_and_nothing_else(
    second: Served, cold: Answer, store: StoreThread
) -> None:
    silent = threading.Event()
    store._loop.call_soon_threadsafe(silent.wait, 60)
    try:
        before = await second.metric("manta_kv_lookups_total", 'outcome="failed"', 'outcome="late"')
        answer = await second.complete(PROMPT)
        assert answer.tokens == cold.tokens
        assert answer.cached["computed"] == len(PROMPT)
        assert before == 0
    finally:
        silent.set()
    await second.forget()
    await eventually(lambda: store.call(store.server.stats).connections >= 4)
    answer = await second.complete(PROMPT)
    assert (answer.tokens, answer.cached["dram"]) == (cold.tokens, 448)


async def test_a_client_that_leaves_during_a_load_leaves_nothing_behind(
    second: Served, cold: Answer, store: StoreThread, honest: None
) -> None:
    begun, go_on = asyncio.Event(), threading.Event()
    loop, load_into = asyncio.get_running_loop(), store.store.load_into

    async def slow(*args: Any) -> LoadResult:
        loop.call_soon_threadsafe(begun.set)
        while not go_on.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)
        return await load_into(*args)

    store.store.load_into = slow  # type: ignore[method-assign]
    gone = asyncio.Event()
    asking = asyncio.create_task(second.ask_until(gone, PROMPT))
    await asyncio.wait_for(begun.wait(), 30)
    gone.set()
    await asking
    try:
        # Long before the load's own limit.
        async with asyncio.timeout(5):
            while await second.metric("vllm:kv_cache_usage_perc"):  # noqa: ASYNC110 - known by asking alone
                await asyncio.sleep(0.01)
    finally:
        go_on.set()
    await second.at_rest()
    store.store.__dict__.pop("load_into")
    answer = await second.complete(PROMPT)
    assert (answer.tokens, answer.cached["dram"]) == (cold.tokens, 448)


async def test_two_requests_that_load_the_same_chunks_answer_alike(second: Served, cold: Answer) -> None:
    answers = await asyncio.gather(*(second.complete(PROMPT) for _ in range(3)))
    assert all(answer.tokens == cold.tokens for answer in answers)
    assert all(answer.cached["computed"] == 2 for answer in answers)
    assert sum(answer.cached["dram"] for answer in answers) >= 448
    await second.at_rest()


async def test_a_reset_while_requests_run_and_save_changes_no_answer(first: Served, second: Served) -> None:
    prompts = [[at + shift for at in PROMPT] for shift in range(3)]
    expected = [(await first.complete(prompt, max_tokens=100)).tokens for prompt in prompts]
    first.store.clear()
    asking = [asyncio.create_task(second.complete(prompt, max_tokens=100)) for prompt in prompts]
    await eventually(lambda: first.store.keys)
    assert await second.engine._llm.reset_prefix_cache(reset_running_requests=True)
    assert [(await answer).tokens for answer in asking] == expected
    await second.at_rest()
    await first.forget()
    for prompt, tokens in zip(prompts, expected, strict=True):
        await second.saved(prompt)
        answer = await first.complete(prompt, max_tokens=100)
        assert (answer.tokens, answer.cached["dram"]) == (tokens, 448)


async def test_adapters_share_with_themselves_and_with_no_namesake(first: Served, second: Served) -> None:
    ours, theirs = first.engine.info.adapters, second.engine.info.adapters
    assert ours["shared"] == theirs["shared"]
    assert ours["style"] != theirs["style"]
    for adapter in ("shared", "style"):
        await first.complete(PROMPT, model=adapter)
        await first.saved(PROMPT, adapter=ours[adapter])
    await second.forget()
    assert (await second.complete(PROMPT, model="style")).cached["computed"] == len(PROMPT)
    await second.forget()
    computed = await first.complete(PROMPT, model="shared")
    answer = await second.complete(PROMPT, model="shared")
    assert (answer.tokens, answer.cached["dram"]) == (computed.tokens, 448)
    base = await second.complete(PROMPT)
    assert base.tokens != answer.tokens, "the adapter changes nothing that could be mixed up"


async def test_tenants_share_with_themselves_alone(first: Served, second: Served) -> None:
    await first.complete(PROMPT, salt="blue")
    await first.saved(PROMPT, salt="blue")
    await second.forget()
    assert (await second.complete(PROMPT, salt="red")).cached["computed"] == len(PROMPT)
    assert (await second.complete(PROMPT, salt="blue")).cached["dram"] == 448


async def test_a_plan_says_whose_quota_it_is_and_what_need_not_be_saved(
    first: Served, store: StoreThread
) -> None:
    await first.forget()
    store.clear()
    await first.complete(PROMPT, plan=Plan(tenant="blue", skip_save=5))
    keys = first.keys(PROMPT)
    await eventually(lambda: set(keys[5:]) <= store.keys)
    await first.at_rest()
    assert store.keys == set(keys[5:])
    tenants = store.call(store.store.stats).tenants
    assert tenants["blue"] == 2 * CHUNK * 2 * 64 * 4


async def test_sampling_several_answers_and_streaming_are_as_ever(second: Served, cold: Answer) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 1, "seed": 5, "n": 3}
    answer = await second.client.post("/v1/completions", json=body)
    assert len(answer.json()["choices"]) == 3
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "stream": True}
    answer = await second.client.post("/v1/completions", json=body)
    assert answer.text.rstrip().endswith("data: [DONE]")
    await second.at_rest()


async def test_the_scheduler_spends_little_time_in_the_connector(second: Served, cold: Answer) -> None:
    await second.complete(PROMPT)
    calls = await second.metric("manta_kv_scheduler_seconds_count")
    short = await second.metric("manta_kv_scheduler_seconds_bucket", 'le="0.005"')
    assert calls > 100
    assert short >= 0.95 * calls


async def test_preempted_requests_answer_alike_beside_nixl(
    first: Served, tiny_model: Path, store: StoreThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for two requests and a half: the engine preempts, with two connectors in it."""
    prompts = [[(at * (shift + 3)) % 400 + 3 for at in range(200)] for shift in range(4)]
    expected = [(await first.complete(prompt, max_tokens=150)).tokens for prompt in prompts]
    await first.at_rest()
    store.clear()
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "0")
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    args = {"max-model-len": 512, "num-gpu-blocks-override": 28, "kv-transfer-config": nixl}
    async with serving(tiny_model, store, **args) as small:
        answers = await asyncio.gather(*(small.complete(prompt, max_tokens=150) for prompt in prompts))
        assert [answer.tokens for answer in answers] == expected
        assert await small.metric("vllm:num_preemptions_total") > 0
        assert await small.metric("manta_kv_saved_chunks_total", 'outcome="stored"') > 0
        await small.at_rest()
        for prompt, tokens in zip(prompts, expected, strict=True):
            await small.forget()
            answer = await small.complete(prompt, max_tokens=150)
            assert (answer.tokens, answer.cached["dram"]) == (tokens, 192)
        await small.at_rest()


async def test_two_ranks_save_and_load_a_part_each(
    first: Served, tiny_model: Path, store: StoreThread, monkeypatch: pytest.MonkeyPatch, honest: None
) -> None:
    await first.forget()
    expected = (await first.complete(PROMPT)).tokens
    cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    args = {"tensor-parallel-size": 2, "distributed-executor-backend": "mp"}
    async with serving(tiny_model, store, **args) as wide:
        answer = await wide.complete(PROMPT)
        assert (answer.tokens, answer.cached["computed"]) == (expected, len(PROMPT))
        await wide.saved(PROMPT)
        await wide.forget()
        before = store.call(store.store.stats).counters.loads["loaded"]
        answer = await wide.complete(PROMPT)
        assert (answer.tokens, answer.cached["dram"]) == (expected, 448)
        assert store.call(store.store.stats).counters.loads["loaded"] == before + 2 * 7
        await wide.forget()

        # One part of one rank is missing: both ranks compute from there on.
        load_into, third = store.store.load_into, wide.keys(PROMPT)[2]

        async def partial(key: ChunkKey, rank: int, target: memoryview, limit_s: float) -> LoadResult:
            if (key, rank) == (third, 1):
                return LoadResult("missing", 0, None)
            return await load_into(key, rank, target, limit_s)

        store.store.load_into = partial  # type: ignore[method-assign]
        answer = await wide.complete(PROMPT)
        assert (answer.tokens, answer.cached["dram"]) == (expected, 2 * CHUNK)
        await wide.at_rest()


async def test_a_model_with_a_sliding_window_is_refused_or_served_without_sharing(
    vllm_environment: None, store: StoreThread, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(NotShareableError, match=r"SlidingWindowSpec.*cache\.share"):
        async with serving(model, store):
            pass
    before = store.keys
    async with serving(model, store, share="auto") as alone:
        answer = await alone.complete(PROMPT)
        again = await alone.complete(PROMPT)
        assert (answer.tokens, answer.cached["computed"]) == (again.tokens, len(PROMPT))
        assert store.call(store.server.stats).connections <= 4
    assert store.keys == before
