"""The simulated engine on a real socket: the official client, clients that leave, connections that break."""

import asyncio
import contextlib
import json
import socket
import time

import httpx
import openai
import pytest
import uvicorn

from cache_store.config import CacheConfig
from workers.config import EngineConfig, ModelConfig, SimConfig
from workers.sim.engine import SimEngine

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "tell me a story"}]}
ABORT_LIMIT_S = 1.0


@contextlib.asynccontextmanager
async def serve(**sim):
    """A started engine and the address of its server."""
    fields = {"prefill_tokens_per_s": 1e6, "decode_tokens_per_s": 1e4, "block_tokens": 4} | sim
    engine = SimEngine(
        EngineConfig(kind="sim", sim=SimConfig(**fields)),
        ModelConfig(name="toy"),
        CacheConfig(chunk_tokens=16),
    )
    await engine.start(lambda events: None)
    server = uvicorn.Server(
        uvicorn.Config(engine.app, log_level="critical", lifespan="off", access_log=False)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server._serve([listener]))
        try:
            await until(lambda: server.started)
            yield engine, f"http://127.0.0.1:{listener.getsockname()[1]}"
            await until(lambda: not engine.open_streams)
            engine.check_integrity()
        finally:
            await engine.shutdown()
            server.should_exit = server.force_exit = True
            await task


async def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.002)


def openai_client(url):
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def test_the_official_client_reads_chats_and_streams_alike():
    async with serve() as (_, url), openai_client(url) as client:
        whole = await client.chat.completions.create(**CHAT, max_tokens=20)
        stream = await client.chat.completions.create(
            **CHAT, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        streamed = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
        assert text == whole.choices[0].message.content
        assert streamed[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
        assert streamed[-1].usage.prompt_tokens_details.cached_tokens > 0


async def test_the_official_client_reads_completions_models_and_errors():
    async with serve() as (_, url), openai_client(url) as client:
        stream = await client.completions.create(model="toy", prompt=["a", "b"], max_tokens=3, stream=True)
        texts = ["", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert [len(text.split()) for text in texts] == [3, 3]
        assert [model.id async for model in client.models.list()] == ["toy"]
        with pytest.raises(openai.NotFoundError, match="`huge` does not exist"):
            await client.completions.create(model="huge", prompt="a")
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="toy", messages=[])


async def test_tokens_arrive_while_the_answer_is_being_made():
    async with serve(decode_tokens_per_s=20.0) as (engine, url), openai_client(url) as client:
        stream = await client.chat.completions.create(**CHAT, max_tokens=5, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                assert engine.load().running == 1
                break
        await stream.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_stops_the_engine_within_a_second(stream, phase):
    slow = {"prefill_overhead_s": 600.0} if phase == "prefill" else {"decode_tokens_per_s": 0.001}
    async with serve(**slow) as (engine, url), openai_client(url) as client:
        asking = asyncio.create_task(_read(client, stream))
        await until(
            lambda: engine.load().running == 1 and (phase == "prefill" or engine.counters.generated_tokens)
        )
        left = time.monotonic()
        asking.cancel()
        await until(lambda: not engine.open_streams)
        assert time.monotonic() - left < ABORT_LIMIT_S
        assert engine.load().kv_used == 0
        assert engine.counters.aborted == 1


async def _read(client, stream):
    answer = await client.chat.completions.create(**CHAT, max_tokens=50, stream=stream)
    if stream:
        async for _ in answer:
            pass


async def test_a_client_that_leaves_the_queue_is_forgotten():
    async with serve(max_running=1, decode_tokens_per_s=0.001) as (engine, url), openai_client(url) as client:
        asking = [asyncio.create_task(_read(client, stream=False)) for _ in range(3)]
        await until(lambda: engine.load().waiting == 2)
        for each in asking:
            each.cancel()
        await until(lambda: not engine.open_streams)


async def _read_lines(http, url, body, lines):
    async with http.stream("POST", url, json=body) as answer:
        async for line in answer.aiter_lines():
            lines.append(line)


@pytest.mark.parametrize("stream", [True, False])
async def test_death_before_the_token_breaks_the_connection(stream):
    async with serve() as (engine, url), httpx.AsyncClient() as http:
        engine.faults.set("die_before_token", count=1)
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post(f"{url}/v1/chat/completions", json=CHAT | {"max_tokens": 3, "stream": stream})
        answer = await http.post(
            f"{url}/v1/chat/completions", json=CHAT | {"max_tokens": 3, "stream": stream}
        )
        assert answer.status_code == 200


async def test_death_in_the_stream_comes_after_the_tokens_that_were_asked_for():
    async with serve(decode_tokens_per_s=200.0) as (engine, url), httpx.AsyncClient() as http:
        engine.faults.set("die_mid_stream", count=1, after_tokens=5)
        lines = []
        with pytest.raises(httpx.RemoteProtocolError):
            await _read_lines(
                http, f"{url}/v1/chat/completions", CHAT | {"max_tokens": 5000, "stream": True}, lines
            )
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert len("".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks).split()) == 5


async def test_death_in_the_stream_leaves_a_whole_answer_without_a_byte():
    async with serve() as (engine, url), httpx.AsyncClient() as http:
        engine.faults.set("die_mid_stream", count=1, after_tokens=2)
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post(f"{url}/v1/chat/completions", json=CHAT | {"max_tokens": 50})


async def test_a_hanging_replica_takes_the_request_and_never_answers():
    async with serve() as (engine, url), httpx.AsyncClient() as http:
        engine.faults.set("hang", count=1)
        hanging = asyncio.create_task(http.post(f"{url}/v1/chat/completions", json=CHAT))
        await until(lambda: engine.faults.kind == "none")
        assert (
            await http.post(f"{url}/v1/chat/completions", json=CHAT | {"max_tokens": 3})
        ).status_code == 200
        assert not hanging.done()
        hanging.cancel()


async def test_a_hundred_streams_at_once_are_all_whole():
    async with (
        serve(max_running=64, decode_tokens_per_s=500.0) as (engine, url),
        openai_client(url) as client,
    ):
        await asyncio.gather(*(_read(client, stream=True) for _ in range(100)))
        assert engine.counters.generated_tokens == 5000
        assert engine.counters.finished == 100
