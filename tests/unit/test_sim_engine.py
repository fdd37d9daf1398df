"""The simulated engine behind the seam: events, load, abort, faults and health."""

import asyncio
import time

import pytest

from cache_store.config import CacheConfig
from workers.config import EngineConfig, ModelConfig, SimConfig
from workers.engine import EngineUnhealthyError
from workers.kv_events import BlocksRemoved, BlocksStored
from workers.request_record import RequestRecord, current_request
from workers.sim.engine import SimEngine
from workers.sim.generation import EngineStoppedError, PromptTooLongError
from workers.sim.sequence import Sampling
from workers.sim.tokens import RenderedPrompt, encode

FAST = {"prefill_tokens_per_s": 1e6, "prefill_overhead_s": 0.0, "decode_tokens_per_s": 1e4, "block_tokens": 4}
SLOW = FAST | {"decode_tokens_per_s": 0.01}


def make(adapters=None, **sim):
    config = EngineConfig(kind="sim", sim=SimConfig(**(FAST | sim)))
    return SimEngine(config, ModelConfig(name="toy", adapters=adapters or {}), CacheConfig(chunk_tokens=16))


@pytest.fixture
async def started():
    """Starts engines, and at the end looks that each is sound and stops it."""
    engines = []

    async def start(*args, **sim):
        engine = make(*args, **sim)
        events = []
        await engine.start(events.extend)
        engines.append(engine)
        return engine, events

    yield start
    for engine in engines:
        engine.check_integrity()
        await engine.shutdown()
        await engine.shutdown()
        assert engine.open_streams == 0


def prompt(text):
    tokens = encode(text)
    return RenderedPrompt(tokens, len(tokens))


async def text_of(generation):
    texts = [""] * len(generation.streams)
    async for outputs in generation.outputs():
        for number, output in outputs:
            texts[number] += output.text
    return texts


async def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.002)


async def test_it_describes_itself_before_and_after_start(started):
    engine, _ = await started({"law": "/models/law"}, blocks=100, max_model_len=1000)
    assert engine.info.models == ("toy", "law")
    assert engine.info.adapters["law"].startswith("law@")
    assert engine.info.max_model_len == 400
    identity = engine.info.identity
    assert (identity.model, identity.platform, identity.block_tokens) == ("sim:toy", "sim", 4)
    assert identity.digest() == make(blocks=7).info.identity.digest()


async def test_each_prompt_gets_each_choice(started):
    engine, _ = await started()
    choices = [Sampling(5, choice=choice) for choice in range(2)]
    texts = await text_of(engine.submit([prompt("one"), prompt("two")], choices))
    assert len(set(texts)) == 4
    assert [len(text.split()) for text in texts] == [5, 5, 5, 5]
    assert engine.counters.generated_tokens == 20


async def test_text_is_the_same_on_another_engine_and_with_a_warm_cache(started):
    (one, _), (two, _) = await started(), await started(blocks=1000)
    texts = [await text_of(engine.submit([prompt("hello" * 9)], [Sampling(9)])) for engine in (one, one, two)]
    assert texts[0] == texts[1] == texts[2]


async def test_hits_are_noted_in_the_request_record(started):
    engine, _ = await started()
    for cached in (0, 8):
        record = RequestRecord("r")
        token = current_request.set(record)
        await text_of(engine.submit([prompt("word" * 11)], [Sampling(2)]))
        current_request.reset(token)
        assert record.first_output.is_set()
        assert (record.prompt_tokens, record.cached_tokens) == (11, cached)


async def test_events_give_the_tokens_of_prompt_and_answer_under_salt_and_adapter(started):
    engine, events = await started({"law": "x"})
    await text_of(engine.submit([prompt("ask " * 6)], [Sampling(7)], adapter="law@1", salt="tenant"))
    stored = [event for event in events if isinstance(event, BlocksStored)]
    assert stored[0].parent is None
    assert {(event.salt, event.adapter, event.block_tokens) for event in stored} == {("tenant", "law@1", 4)}
    told = [token for event in stored for token in event.tokens]
    assert told[:6] == encode("ask " * 6).tolist()
    # 6 + 7 tokens, of which the last has no KV: 3 full blocks.
    assert len(told) == 12


async def test_events_always_add_up_to_the_cache(started):
    engine, events = await started(blocks=32, max_running=4)
    prompts = [prompt(f"{number % 5} story " * 8) for number in range(40)]
    await asyncio.gather(*(text_of(engine.submit([each], [Sampling(12)])) for each in prompts))
    present = set()
    for event in events:
        if isinstance(event, BlocksRemoved):
            present -= set(event.hashes)
        else:
            assert event.parent is None or event.parent in present
            present |= set(event.hashes)
    assert present == engine.blocks.cached
    assert any(isinstance(event, BlocksRemoved) for event in events)
    assert engine.load().kv_used == 0


async def test_an_aborted_request_frees_its_blocks_at_once_and_its_reader_is_released(started):
    engine, _ = await started(**SLOW)
    generation = engine.submit([prompt("abcd" * 40)], [Sampling(100), Sampling(100, choice=1)])
    reader = asyncio.create_task(text_of(generation))
    await until(lambda: engine.load().running == 2)
    engine.abort(generation)
    assert engine.load().kv_used == 0
    assert engine.open_streams == 0
    await asyncio.wait_for(reader, 5)
    engine.abort(generation)


async def test_what_waits_runs_when_an_abort_makes_room(started):
    engine, _ = await started(**SLOW, max_running=1)
    first = engine.submit([prompt("one")], [Sampling(100)])
    second = engine.submit([prompt("two")], [Sampling(1)])
    await until(lambda: engine.load().running == 1)
    assert engine.load().waiting == 1
    engine.abort(first)
    assert await asyncio.wait_for(text_of(second), 5) != [""]


async def test_an_abort_storm_leaves_nothing(started):
    engine, _ = await started(max_running=16, decode_tokens_per_s=200.0)
    generations = [engine.submit([prompt(f"story {number} " * 20)], [Sampling(20)]) for number in range(200)]
    readers = [asyncio.create_task(text_of(each)) for each in generations]
    await until(lambda: engine.load().running > 4)
    for generation in generations[:180]:
        engine.abort(generation)
        engine.check_integrity()
    texts = await asyncio.gather(*readers)
    assert all(len(text.split()) == 20 for (text,) in texts[180:])
    assert (engine.load().running, engine.load().waiting, engine.load().kv_used) == (0, 0, 0.0)


async def test_a_prompt_without_room_for_an_answer_is_refused_with_both_numbers(started):
    engine, _ = await started(max_model_len=10)
    with pytest.raises(PromptTooLongError, match=r"length is 10 tokens.*contains 10 input"):
        engine.submit([prompt("abcd" * 10)], [Sampling(1)])
    texts = await text_of(engine.submit([prompt("abcd" * 8)], [Sampling(100)]))
    assert len(texts[0].split()) == 2


async def test_idle_engines_arm_no_timer(started):
    engine, _ = await started()
    await text_of(engine.submit([prompt("hi")], [Sampling(3)]))
    assert engine.scheduler.next_at() is None
    assert engine._timer is None


async def test_readers_of_an_engine_that_shuts_down_get_an_error(started):
    engine, _ = await started(**SLOW)
    reader = asyncio.create_task(text_of(engine.submit([prompt("hi")], [Sampling(3)])))
    await until(lambda: engine.load().running == 1)
    await engine.shutdown()
    with pytest.raises(EngineStoppedError):
        await reader
    with pytest.raises(EngineStoppedError):
        engine.submit([prompt("hi")], [Sampling(3)])


async def test_an_engine_whose_events_are_not_taken_stops_and_says_so():
    engine = make()

    def broken(events):
        raise OSError("nobody listens")

    await engine.start(broken)
    await engine.check_health()
    with pytest.raises(EngineStoppedError, match="nobody listens"):
        await text_of(engine.submit([prompt("abcd" * 8)], [Sampling(3)]))
    with pytest.raises(EngineUnhealthyError, match="nobody listens"):
        await engine.check_health()


async def test_health_fails_before_start_and_under_the_fault(started):
    with pytest.raises(EngineUnhealthyError, match="not started"):
        await make().check_health()
    engine, _ = await started()
    engine.faults.set("unhealthy")
    with pytest.raises(EngineUnhealthyError, match="unhealthy"):
        await engine.check_health()
    engine.faults.set("none")
    await engine.check_health()


def test_faults_strike_as_often_as_they_are_told():
    faults = make().faults
    faults.set("refuse", count=2)
    assert [faults.strike() for _ in range(3)] == ["refuse", "refuse", "none"]
    faults.set("hang")
    assert [faults.strike() for _ in range(3)] == ["hang"] * 3


def test_a_lost_delta_is_lost_once_unless_a_number_is_given():
    faults = make().faults
    faults.set("lose_delta")
    assert faults.strike() == "none"
    assert [faults.take_lost_delta() for _ in range(2)] == [True, False]
    faults.set("lose_delta", count=2)
    assert [faults.take_lost_delta() for _ in range(3)] == [True, True, False]


@pytest.mark.parametrize("wrong", [("explode",), ("refuse", 0), ("die_mid_stream", 1, 0)])
def test_a_fault_that_does_not_exist_is_refused(wrong):
    with pytest.raises(ValueError, match="needed"):
        make().faults.set(*wrong)
