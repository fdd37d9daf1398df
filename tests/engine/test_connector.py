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
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from cache_store.chunk import checksum
from cache_store.events import ChunkKey
from cache_store.node_store import LoadResult
from tests.engine.served import BLOCK, Answer, Served, eventually, serving
from tests.engine.store_thread import StoreThread
from tests.tiny_adapter import make_tiny_adapter
from tests.tiny_model import make_tiny_model
from workers.messages import Plan
from workers.vllm.connector.shareable import NotShareableError

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

CHUNK = 64
STEPS = {"max-num-batched-tokens": 128}
"""Prompts of several chunks are computed in several steps."""
GUESSING = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PROMPT = [(7 * at + at * at // 5) % 400 + 3 for at in range(450)]
"""Seven whole chunks and two tokens."""


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
    async with serving(tiny_model, store, adapters, **STEPS) as served:
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
    async with serving(tiny_model, store, adapters, **STEPS, **{"speculative-config": GUESSING}) as served:
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

    store.change_loads(changed)


@pytest.fixture
def honest(store: StoreThread) -> Iterator[None]:
    """After the test the store is itself again."""
    yield
    store.behave()


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
    await eventually(lambda: kept <= store.in_memory)
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
    assert second.store.in_memory == set(second.keys(tokens[:-1]))
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
        counts = await second.counts()
        answer = await second.complete(PROMPT)
        assert answer.tokens == cold.tokens
        assert answer.cached["computed"] == len(PROMPT)
        grown = await second.counts() - counts
        assert grown["lookups late"] + grown["lookups failed"] > 0
    finally:
        silent.set()
    await second.forget()
    await eventually(lambda: store.call(store.server.stats).connections >= 4)
    answer = await second.complete(PROMPT)
    assert (answer.tokens, answer.cached["dram"]) == (cold.tokens, 448)


async def test_a_client_that_leaves_during_a_load_leaves_nothing_behind(
    second: Served, cold: Answer, store: StoreThread
) -> None:
    counts, leave = await second.counts(), asyncio.Event()
    with store.hold_load_of(second.keys(PROMPT)[2]) as hold:
        asking = asyncio.create_task(second.ask_and_leave(PROMPT, leave))
        await asyncio.to_thread(hold.waiting.wait)
        leave.set()
        await asking
        # While the store still works on its load, and not because that took too long.
        await second.blocks_free()
        assert not store.nothing_open()
        assert not any("late" in name for name in await second.counts() - counts)
    await second.at_rest()
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
    await eventually(lambda: first.store.in_memory)
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
    await eventually(lambda: set(keys[5:]) <= store.in_memory)
    await first.at_rest()
    assert store.in_memory == set(keys[5:])
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
    args = STEPS | {"max-model-len": 512, "num-gpu-blocks-override": 28, "kv-transfer-config": nixl}
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
    args = STEPS | {"tensor-parallel-size": 2, "distributed-executor-backend": "mp"}
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

        store.change_loads(partial)
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
    before = store.in_memory
    async with serving(model, store, share="auto") as alone:
        answer = await alone.complete(PROMPT)
        again = await alone.complete(PROMPT)
        assert (answer.tokens, answer.cached["computed"]) == (again.tokens, len(PROMPT))
        assert store.call(store.server.stats).connections <= 4
    assert store.in_memory == before
