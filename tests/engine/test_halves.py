"""One engine computes a prompt, another answers over NIXL: the same tokens as from one, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from cluster.render_vllm import VllmRenderer
from router.headers import parse_cached
from tests.engine.halves_rig import ARGS, BLOCK, CHUNK, Replica, replica, router_before, shortened
from tests.engine.served import eventually
from tests.engine.store_thread import StoreThread
from workers.messages import HANDOVER_HEADER, REFUSED, why_not

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(240)]

LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 150, 513, 1500)


def prompt(tokens: int, seed: int = 7) -> list[int]:
    """Each differs from any other of another seed from its first token on."""
    return [(seed * 31 + 7 * at + at * at // 5) % 400 + 3 for at in range(tokens)]


@pytest.fixture(scope="module")
def store() -> Any:
    store = StoreThread(CHUNK)
    yield store
    store.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def prefill(vllm_environment: None, tiny_model: Path, store: StoreThread) -> AsyncIterator[Replica]:
    async with replica("prefill", tiny_model, store) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def decode(prefill: Replica, tiny_model: Path, store: StoreThread) -> AsyncIterator[Replica]:
    """Started last: the page of metrics is its own."""
    async with replica("decode", tiny_model, store) as started:
        yield started


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _nothing_is_left(prefill: Replica, decode: Replica) -> AsyncIterator[None]:
    yield
    await prefill.holds_nothing()
    await decode.holds_nothing()
    assert prefill.hosted.handovers is not None
    prefill.hosted.handovers.check_integrity()
    assert len(prefill.hosted.handovers) == 0


async def test_they_know_of_each_other_that_they_fit(prefill: Replica, decode: Replica) -> None:
    one, other = prefill.engine.info.transfer, decode.engine.info.transfer
    assert one is not None
    assert other is not None
    assert why_not(one, other) == why_not(other, one) == ""
    assert one.engine != other.engine


@pytest.mark.parametrize("tokens", LENGTHS)
async def test_the_answer_is_that_of_one_engine(prefill: Replica, decode: Replica, tokens: int) -> None:
    asked = prompt(tokens, seed=tokens)
    whole = await prefill.complete(asked, salt="whole")
    before = await decode.fetched_tokens()
    handover = await prefill.keeps(asked)
    assert handover.tokens == tokens
    answer = await decode.complete(asked, handover)
    assert answer.tokens == whole.tokens
    assert answer.cached["computed"] <= BLOCK
    assert answer.cached.get("nixl", 0) == tokens - answer.cached["computed"]
    # All of it came, and the last token is computed again, to sample from.
    assert await decode.fetched_tokens() - before in (tokens, tokens - 1)
    assert await prefill.end(handover) == 200


@pytest.mark.parametrize("held", [BLOCK, 5 * BLOCK + 3, 600])
async def test_a_prefix_that_is_there_is_not_sent(prefill: Replica, decode: Replica, held: int) -> None:
    asked = prompt(600, seed=1000 + held)
    whole = await prefill.complete(asked, salt="whole")
    await decode.complete(asked[:held], max_tokens=1)
    handover = await prefill.keeps(asked)
    answer = await decode.complete(asked, handover)
    assert answer.tokens == whole.tokens
    assert answer.cached["hbm"] == min(held, 599) // BLOCK * BLOCK
    assert sum(answer.cached.values()) == 600
    assert answer.cached["computed"] <= BLOCK
    await prefill.end(handover)


async def test_what_the_store_has_is_loaded_by_who_computes(prefill: Replica, decode: Replica) -> None:
    asked = prompt(600, seed=77)
    whole = await prefill.complete(asked)
    await prefill.forget()
    half = await prefill.keeps(asked)
    answer = await decode.complete(asked, half)
    assert answer.tokens == whole.tokens
    assert answer.cached.get("dram", 0) == 0
    assert answer.cached["nixl"] == 600 - answer.cached["computed"]
    await prefill.end(half)


@pytest.mark.parametrize("stream", [True, False])
async def test_choices_share_what_was_fetched_once(prefill: Replica, decode: Replica, stream: bool) -> None:
    asked = prompt(300, seed=9 + stream)
    options: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 12}
    whole = await prefill.complete(asked, salt="whole", **options)
    handover = await prefill.keeps(asked, **options, stream=stream)
    if stream:
        answered = await decode.post(
            "/v1/completions",
            {**options, "prompt": "p", "stream": True, "return_token_ids": True},
            asked,
            handover,
        )
        found: list[list[int]] = [[], []]
        for line in answered.text.splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    found[choice["index"]] += choice["token_ids"] or []
    else:
        answer = await decode.complete(asked, handover, **options)
        found = answer.tokens
        assert answer.cached["nixl"] >= 300 - BLOCK
    assert found == whole.tokens
    await prefill.end(handover)


async def test_tools_and_chat_go_in_halves_too(prefill: Replica, decode: Replica) -> None:
    asked = prompt(200, seed=33)
    chat = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 8,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = await prefill.post("/v1/chat/completions", chat, asked, **{"x-manta-cache-salt": "whole"})
    half = await prefill.post(
        "/v1/chat/completions", chat | {"stream": True}, asked, **{HANDOVER_HEADER: "chat"}
    )
    assert half.headers[HANDOVER_HEADER] == "held"
    from workers.messages import unpack_handover

    handover = unpack_handover(half.content)
    answer = await decode.post("/v1/chat/completions", chat, asked, handover)
    assert answer.json()["choices"][0]["message"] == whole.json()["choices"][0]["message"]
    assert "nixl=" in answer.headers["x-manta-cached"]
    await prefill.end(handover)


async def test_a_bad_request_is_refused_as_the_client_s_own(prefill: Replica) -> None:
    answer = await prefill.first_half(prompt(8), max_tokens="many")
    assert answer.status_code == 400
    assert HANDOVER_HEADER not in answer.headers
    assert "max_tokens" in answer.json()["error"]["message"]


async def test_what_needs_the_prompt_s_own_probabilities_is_not_halved(prefill: Replica) -> None:
    answer = await prefill.first_half(prompt(8), prompt_logprobs=1)
    assert (answer.status_code, answer.headers[HANDOVER_HEADER]) == (409, REFUSED)


async def test_what_nobody_fetches_is_free_at_once_when_it_is_ended(
    prefill: Replica, decode: Replica
) -> None:
    handover = await prefill.keeps(prompt(900, seed=3))
    assert prefill.engine.load().kv_used > 0
    began = time.monotonic()
    assert await prefill.end(handover) == 200
    await prefill.holds_nothing()
    # Left alone the engine would keep it for half a minute.
    assert time.monotonic() - began < handover.hold_s / 6
    assert await prefill.end(handover) == 404


async def test_what_came_too_late_is_had_from_elsewhere(prefill: Replica, decode: Replica) -> None:
    asked = prompt(400, seed=21)
    whole = await prefill.complete(asked, salt="whole")
    handover = await prefill.keeps(asked)
    answer = await decode.complete(asked, shortened(handover, 0.0))
    assert answer.tokens == whole.tokens
    assert "nixl" not in answer.cached
    await prefill.end(handover)


async def test_kv_of_another_prompt_is_not_used(prefill: Replica, decode: Replica) -> None:
    asked = prompt(400, seed=22)
    whole = await prefill.complete(asked, salt="whole")
    handover = await prefill.keeps(prompt(400, seed=23))
    answer = await decode.complete(asked, handover)
    assert (answer.tokens, answer.cached["computed"]) == (whole.tokens, 400)
    await prefill.end(handover)


@pytest.mark.parametrize("field", ["kv_transfer_params", "vllm_xargs"])
async def test_a_client_s_own_transfer_parameters_reach_no_engine(prefill: Replica, field: str) -> None:
    keep: dict[str, Any] = {"do_remote_decode": True}
    given = keep if field == "kv_transfer_params" else {"kv_transfer_params": json.dumps(keep)}
    answer = await prefill.post(
        "/v1/completions", {"prompt": "p", "max_tokens": 1, field: given}, prompt(200, seed=5)
    )
    assert answer.status_code == 200
    assert not answer.json().get("kv_transfer_params")
    await prefill.holds_nothing()


async def test_a_client_that_leaves_while_its_prompt_is_computed_leaves_nothing(prefill: Replica) -> None:
    asking = asyncio.ensure_future(prefill.first_half(prompt(6000, seed=44), name="left"))
    await eventually(lambda: prefill.engine.load().running or asking.done())
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    handovers = prefill.hosted.handovers
    assert handovers is not None
    await handovers.end("left")
    await eventually(lambda: not len(handovers))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def front_renderer(vllm_environment: None, tiny_model: Path) -> VllmRenderer:
    renderer = VllmRenderer(str(tiny_model), ARGS)
    await renderer.start()
    return renderer


@pytest.mark.parametrize("stream", [True, False])
async def test_through_a_router_the_client_sees_one_answer(
    prefill: Replica, decode: Replica, front_renderer: VllmRenderer, stream: bool
) -> None:
    text = f"{stream} " + "a prefix is computed once and moved when that beats computing it again " * 8
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 12,
        "temperature": 0,
    }
    whole = await prefill.post("/v1/chat/completions", body, **{"x-manta-cache-salt": "whole"})
    async with router_before([prefill, decode], front_renderer, when="always") as client:
        answer = await client.post("/v1/chat/completions", json=body | {"stream": stream})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-manta-replica"] == decode.hosted.id
        assert answer.headers["x-manta-prefill"] == prefill.hosted.id
        cached = parse_cached(answer.headers["x-manta-cached"])
        assert cached["computed"] <= BLOCK
        assert cached["nixl"] == sum(cached.values()) - cached["computed"] - cached["hbm"]
        page = (await client.get("/metrics")).text
        assert 'manta_router_prefills_total{outcome="disaggregated",reason="always"} 1.0' in page
    expected = whole.json()["choices"][0]["message"]["content"]
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        said = "".join(choice["delta"].get("content") or "" for each in events for choice in each["choices"])
    else:
        said = answer.json()["choices"][0]["message"]["content"]
    assert said == expected


async def test_through_a_router_a_bad_request_is_answered_once(
    prefill: Replica, decode: Replica, front_renderer: VllmRenderer
) -> None:
    async with router_before([prefill, decode], front_renderer, when="always") as client:
        body = {"model": "tiny", "prompt": "hello", "temperature": -1}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 400
        assert "temperature" in answer.json()["error"]["message"]
        page = (await client.get("/metrics")).text
        assert 'outcome="fallback"' not in page


@pytest.mark.long
@pytest.mark.parametrize(
    "tokens", [*range(3, 30, 5), 255, 256, 257, 1000, 2047, 2048, 2049, 3000, 4500, 6000]
)
@pytest.mark.parametrize("held", [0.0, 0.4])
async def test_the_answer_is_that_of_one_engine_whatever_the_length(
    prefill: Replica, decode: Replica, tokens: int, held: float
) -> None:
    asked = prompt(tokens, seed=10_000 + tokens + int(held * 10))
    whole = await prefill.complete(asked, salt="whole")
    if before := int(tokens * held):
        await decode.complete(asked[:before], max_tokens=1)
    handover = await prefill.keeps(asked)
    answer = await decode.complete(asked, handover)
    assert answer.tokens == whole.tokens
    assert answer.cached["computed"] <= BLOCK
    assert sum(answer.cached.values()) == tokens
    await prefill.end(handover)


def engine_processes() -> dict[int, psutil.Process]:
    return {child.pid: child for child in psutil.Process().children(recursive=True)}


@pytest.mark.long
@pytest.mark.parametrize("met", [True, False])
async def test_an_engine_that_is_killed_after_its_hand_over_costs_time_alone(
    decode: Replica, prefill: Replica, tiny_model: Path, store: StoreThread, met: bool
) -> None:
    asked = prompt(800, seed=60 + met)
    whole = await prefill.complete(asked, salt="whole")
    before = engine_processes()
    async with replica("prefill", tiny_model, store) as dying:
        if met:
            first = await dying.keeps(prompt(100, seed=62))
            await decode.complete(prompt(100, seed=62), first)
        handover = await dying.keeps(asked, salt="dying")
        for pid, process in engine_processes().items():
            if pid not in before:
                process.kill()
        answer = await decode.complete(asked, handover, salt="dying")
        assert (answer.tokens, answer.cached["computed"]) == (whole.tokens, 800)


@pytest.mark.long
async def test_an_answer_given_up_while_its_kv_is_on_its_way_leaves_nothing(
    decode: Replica, prefill: Replica, tiny_model: Path, store: StoreThread
) -> None:
    asked = prompt(800, seed=70)
    before = engine_processes()
    async with replica("prefill", tiny_model, store) as dying:
        handover = await dying.keeps(asked)
        started = [process for pid, process in engine_processes().items() if pid not in before]
        for process in started:
            process.suspend()
        asking = asyncio.ensure_future(decode.complete(asked, handover))
        await eventually(lambda: decode.engine.load().kv_used > 0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        for process in started:
            process.kill()
        await decode.holds_nothing()


@pytest.mark.long
async def test_kv_of_an_engine_that_was_started_anew_is_never_another_prompt_s(
    decode: Replica, prefill: Replica, tiny_model: Path, store: StoreThread
) -> None:
    asked, other = prompt(800, seed=51), prompt(800, seed=52)
    whole = await prefill.complete(asked, salt="whole")
    async with replica("prefill", tiny_model, store) as dying:
        # Known to the one that fetches, and not.
        for _ in range(2):
            handover = await dying.keeps(asked)
        port = os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "workers.vllm.nixl.side_channel",
            lambda host, env: {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": port},
        )
        async with replica("prefill", tiny_model, store) as successor:
            kept = await successor.keeps(other)
            assert kept.params["remote_port"] == handover.params["remote_port"]
            assert kept.engine != handover.engine
            answer = await decode.complete(asked, handover, salt="fresh")
            assert answer.tokens == whole.tokens
            assert answer.cached.get("nixl", 0) == 0
            await successor.end(kept)
