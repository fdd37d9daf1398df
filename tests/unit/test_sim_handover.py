"""Hand-overs between simulated engines: what is kept, what is fetched, and what is computed instead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from cache_store.config import CacheConfig
from workers.config import EngineConfig, ModelConfig, SimConfig
from workers.handover import Fetch, FirstHalf, Handover
from workers.request_record import RequestRecord, current_request
from workers.sim.engine import SimEngine
from workers.sim.sequence import Sampling
from workers.sim.tokens import RenderedPrompt, encode
from workers.transfer import TransferConfig

FAST = {"prefill_tokens_per_s": 1e6, "prefill_overhead_s": 0.0, "decode_tokens_per_s": 1e4, "block_tokens": 4}
Start = Callable[..., Awaitable[SimEngine]]
TEXT = "a prompt of some blocks and a bit more than that"


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    engines = []

    async def started(**sim: Any) -> SimEngine:
        engine = SimEngine(
            EngineConfig(kind="sim", sim=SimConfig(**(FAST | sim))),
            ModelConfig(name="toy"),
            CacheConfig(chunk_tokens=16),
            transfer=TransferConfig(),
        )
        await engine.start(lambda events: None)
        engines.append(engine)
        return engine

    yield started
    for engine in engines:
        engine.check_integrity()
        assert engine.load().kv_used == 0
        await engine.shutdown()


def prompt(text: str = TEXT) -> RenderedPrompt:
    tokens = encode(text)
    return RenderedPrompt(tokens, len(tokens))


async def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.001)


async def text_of(generation: Any) -> str:
    return "".join([output.text async for outputs in generation.outputs() for _, output in outputs])


async def handed_over(engine: SimEngine, text: str = TEXT) -> Handover:
    half = FirstHalf("one")
    generation = engine.submit([prompt(text)], [Sampling(max_tokens=1, keep=half.name)])
    await text_of(generation)
    engine.keep(half, generation, "")
    assert half.handover is not None
    return half.handover


async def answer(
    engine: SimEngine, handover: Handover | None, text: str = TEXT, left_s: float = 10.0
) -> tuple[str, dict[str, int]]:
    """What it says, and the prompt's tokens by where they came from."""
    record = RequestRecord("r")
    token = current_request.set(record)
    try:
        fetch = Fetch(handover, time.monotonic() + left_s) if handover is not None else None
        said = await text_of(engine.submit([prompt(text)], [Sampling(max_tokens=6)], fetch=fetch))
    finally:
        current_request.reset(token)
    return said, record.tiers | {"computed": record.prompt_tokens - record.cached_tokens}


async def test_one_computes_and_the_other_answers_as_if_it_had(start: Start) -> None:
    prefill, decode, alone = await start(), await start(), await start()
    handover = await handed_over(prefill)
    assert prefill.load().kv_used > 0
    said, tokens = await answer(decode, handover)
    assert said == (await answer(alone, None))[0]
    assert tokens == {"hbm": 0, "nixl": handover.tokens - 1, "computed": 1}
    await prefill.release(handover)


async def test_what_is_there_already_is_not_sent(start: Start) -> None:
    prefill, decode = await start(), await start()
    await answer(decode, None, TEXT[:24])
    handover = await handed_over(prefill)
    _, tokens = await answer(decode, handover)
    held = len(encode(TEXT[:24])) // 4 * 4
    assert tokens == {"hbm": held, "nixl": handover.tokens - 1 - held, "computed": 1}
    await prefill.release(handover)


async def test_released_blocks_are_free_and_what_they_held_is_computed(start: Start) -> None:
    prefill, decode = await start(), await start()
    handover = await handed_over(prefill)
    await prefill.release(handover)
    assert prefill.load().kv_used == 0
    assert (await answer(decode, handover))[1] == {"hbm": 0, "computed": handover.tokens}


async def test_kv_of_an_engine_that_stopped_is_computed(start: Start) -> None:
    prefill, decode = await start(), await start()
    handover = await handed_over(prefill)
    await prefill.shutdown()
    assert (await answer(decode, handover))[1] == {"hbm": 0, "computed": handover.tokens}


async def test_kv_of_the_engine_before_is_not_that_of_its_successor(start: Start) -> None:
    prefill, decode = await start(), await start()
    handover = await handed_over(prefill)
    await prefill.shutdown()
    successor = await start()
    other = await handed_over(successor, "another prompt of the same name at the same place")
    assert other.engine != handover.engine
    assert (await answer(decode, handover))[1] == {"hbm": 0, "computed": handover.tokens}
    await successor.release(other)


@pytest.mark.parametrize("wrong", ["prompt", "late"])
async def test_another_prompt_s_kv_and_what_comes_late_are_not_used(start: Start, wrong: str) -> None:
    prefill, decode = await start(), await start()
    handover = await handed_over(prefill)
    if wrong == "prompt":
        found = await answer(decode, handover, TEXT.replace("bit", "lot"))
    else:
        found = await answer(decode, handover, left_s=0.0)
    assert found[1]["computed"] == handover.tokens
    await prefill.release(handover)


async def test_nobody_fetches_for_ever(start: Start) -> None:
    prefill = await start()
    prefill._hold_s = 0.01  # type: ignore[assignment]
    await handed_over(prefill)
    await until(lambda: prefill.load().kv_used == 0)


async def test_a_client_that_leaves_while_its_kv_is_on_its_way_leaves_nothing(start: Start) -> None:
    prefill, decode = await start(), await start(transfer_tokens_per_s=0.001)
    handover = await handed_over(prefill)
    generation = decode.submit(
        [prompt()], [Sampling(max_tokens=6)], fetch=Fetch(handover, time.monotonic() + 10)
    )
    assert decode.open_streams == 1
    decode.check_integrity()
    decode.abort(generation)
    assert (decode.open_streams, decode.load().kv_used) == (0, 0)
    await prefill.release(handover)


async def test_what_is_told_of_another_process_is_believed_while_that_lives(start: Start) -> None:
    prefill, decode = await start(), await start()
    handover = await handed_over(prefill)
    host, _, name = handover.engine.split("/")
    dead = msgspec.structs.replace(handover, engine=f"{host}/{2**30}/{name}")
    assert (await answer(decode, dead))[1]["computed"] == handover.tokens
    await prefill.release(handover)
