"""What clients get: what the replica says, byte for byte, whatever form the prompt has."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.integration.in_process import (
    CHUNK_TOKENS,
    MODEL,
    SECRET,
    Cluster,
    cached_header,
    chat,
    http_client,
    prompt,
    running,
    until,
    words,
)
from workers.messages import SECRET_HEADER
from workers.sim.tokens import encode

IMAGE = "data:image/png;base64,iVBORw0KGgo="


async def directly(cluster: Cluster, path: str, body: dict[str, Any]) -> httpx.Response:
    async with http_client(headers={SECRET_HEADER: SECRET}) as http:
        return await http.post(cluster.nodes[0].url + path, json=body)


async def test_a_chat_through_the_official_client_says_what_the_replica_says(cluster: Cluster) -> None:
    async with cluster.openai() as client:
        whole = await client.chat.completions.create(**chat("tell me a story", max_tokens=40))
        stream = await client.chat.completions.create(
            **chat("tell me a story", max_tokens=40), stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    asked = await directly(cluster, "/v1/chat/completions", chat("tell me a story", max_tokens=40))
    text = asked.json()["choices"][0]["message"]["content"]
    assert whole.choices[0].message.content == text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40


async def test_completions_of_several_prompts_and_choices_come_back_in_their_order(cluster: Cluster) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": ["one", "two"], "n": 2, "max_tokens": 6}
    async with cluster.openai() as client:
        whole = await client.completions.create(**body)
        texts = ["", "", "", ""]
        async for chunk in await client.completions.create(**body, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    asked = (await directly(cluster, "/v1/completions", body)).json()
    assert [choice.text for choice in whole.choices] == [choice["text"] for choice in asked["choices"]]
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) == 4


async def test_a_stream_is_the_replicas_stream(cluster: Cluster) -> None:
    body = chat("the same", stream=True, stream_options={"include_usage": True})
    headers = {"x-request-id": "of-the-client"}  # names the answer, so that both have one name
    routed = await cluster.http.post("/v1/chat/completions", json=body, headers=headers)
    async with http_client(headers={SECRET_HEADER: SECRET, **headers}) as http:
        asked = await http.post(cluster.nodes[0].url + "/v1/chat/completions", json=body)

    def read(text: str) -> tuple[str, list[Any]]:
        """The words, which come in pieces as the clock has it, and everything else."""
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) | {"created": 0} for event in events[:-1]]
        said = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["delta"].get("content")]
        text = "".join(chunk["choices"][0]["delta"].pop("content") for chunk in said)
        return text, [chunks[0], *chunks[-2:]]

    assert read(routed.text) == read(asked.text)
    assert routed.headers["content-type"] == asked.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [
        ("/v1/completions", {"prompt": "a text of some words"}, 1),
        ("/v1/completions", {"prompt": list(range(1, 200))}, 1),
        ("/v1/completions", {"prompt": ["one text", "another"]}, 2),
        ("/v1/completions", {"prompt": [[1, 2, 3], [4, 5, 6, 7]]}, 2),
        ("/v1/chat/completions", chat("text"), 1),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]},
            1,
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}]},
            1,
        ),
    ],
    ids=["text", "ids", "texts", "lists-of-ids", "chat", "parts", "image"],
)
async def test_every_form_of_prompt_is_tokenised_and_answered(
    cluster: Cluster, path: str, body: dict[str, Any], prompts: int
) -> None:
    answer = await cluster.http.post(path, json={"model": MODEL, "max_tokens": 3} | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-manta-replica"] in {node.id for node in cluster.nodes}
    usage = answer.json()["usage"]
    assert len(answer.json()["choices"]) == prompts
    (decision,) = cluster.core.log
    assert decision.request.prompt_tokens == usage["prompt_tokens"] == sum(cached_header(answer).values())


async def test_x_manta_cached_tells_the_truth(cluster: Cluster) -> None:
    text = words(500, "true")
    body = prompt(text)
    first = await cluster.http.post("/v1/completions", json=body)
    await until(lambda: cluster.router.knows(cluster.nodes))
    again = await cluster.http.post("/v1/completions", json=prompt(text + "more" * 100))
    assert again.headers["x-manta-replica"] == first.headers["x-manta-replica"]
    for answer, tokens, cached in ((first, 500, 0), (again, 600, 496)):
        assert cached_header(answer) == {"hbm": cached, "computed": tokens - cached}
        assert answer.json()["usage"]["prompt_tokens"] == tokens
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    decisions = list(cluster.core.log)
    # Only whole chunks can be expected; the engine finds the blocks behind them too.
    assert [d.choice.matched_tokens for d in decisions if d.choice] == [0, 500 // CHUNK_TOKENS * CHUNK_TOKENS]
    assert [d.measured.cached_tokens for d in decisions if d.measured] == [0, 496]


async def test_nothing_behind_an_image_is_keyed(cluster: Cluster) -> None:
    before, behind = words(3 * CHUNK_TOKENS, "text"), words(5 * CHUNK_TOKENS, "more")
    parts = [
        {"type": "text", "text": before},
        {"type": "image_url", "image_url": {"url": IMAGE}},
        {"type": "text", "text": behind},
    ]
    body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 2 * CHUNK_TOKENS}
    answer = await cluster.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    await until(lambda: cluster.router.knows(cluster.nodes))
    node = cluster.node(answer.headers["x-manta-replica"])
    assert len(node.hosted.publisher.keys("hbm")) == 3
    (decision,) = cluster.core.log
    assert decision.chunks == 3


async def test_a_body_of_a_mebibyte_is_routed(cluster: Cluster) -> None:
    text = words(60_000, "long")
    body = prompt(text, user="x" * ((1 << 20) - len(text)))
    answer = await cluster.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert cached_header(answer)["computed"] == 60_000


async def test_paths_that_are_not_rendered_are_forwarded_as_they_are(cluster: Cluster) -> None:
    tokens = encode("some text").tolist()
    answer = await cluster.http.post("/tokenize", json={"model": MODEL, "prompt": "some text"})
    assert answer.json()["tokens"] == tokens
    answer = await cluster.http.post("/detokenize", json={"model": MODEL, "tokens": tokens})
    assert answer.json()["prompt"] == "some text"
    assert "x-manta-cached" not in answer.headers
    models = await cluster.http.get("/v1/models")
    assert [model["id"] for model in models.json()["data"]] == [MODEL, "law"]
    assert (await cluster.http.get("/v1/of-another-age?a=b")).status_code == 404


async def test_an_adapter_is_asked_for_by_its_public_name_and_has_keys_of_its_own(cluster: Cluster) -> None:
    answers = [
        await cluster.http.post("/v1/completions", json=prompt(words(200, "law"), model=model))
        for model in (MODEL, "law")
    ]
    assert [answer.json()["model"] for answer in answers] == [MODEL, "law"]
    assert cached_header(answers[1])["hbm"] == 0
    digests = {decision.digest for decision in cluster.core.log}
    assert len(digests) == 2


async def test_a_conversation_returns_to_its_replica_and_finds_what_was_said() -> None:
    async with running(4) as cluster, cluster.openai() as client:
        for name in ("first", "second", "third"):
            messages: list[Any] = [{"role": "system", "content": words(200, name)}]
            served, cached = [], []
            for turn in range(4):
                messages.append({"role": "user", "content": words(80, f"q{turn}")})
                raw = await client.chat.completions.with_raw_response.create(
                    model=MODEL, messages=messages, max_tokens=100
                )
                answer = raw.parse()
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                served.append(raw.headers["x-manta-replica"])
                assert answer.usage is not None
                assert answer.usage.prompt_tokens_details is not None
                cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
                await until(lambda: cluster.router.knows(cluster.nodes))
            assert len(set(served)) == 1
            assert 0 == cached[0] < 200 < cached[1] < cached[2] < cached[3]
        matched = [d.choice.matched_tokens for d in cluster.core.log if d.choice]
        assert all(later > 300 for later in matched[1::4])


async def test_the_next_turn_does_not_find_its_replica_busy_with_the_turn_before(cluster: Cluster) -> None:
    """Its last load report may still tell of that one."""
    body = prompt(words(5 * CHUNK_TOKENS, "turn"), max_tokens=1000)
    first = asyncio.create_task(cluster.http.post("/v1/completions", json=body))
    await until(lambda: any(entry.load and entry.load.http_requests for entry in cluster.core.directory))
    for node in cluster.nodes:
        await node.silence()
    replica = (await first).headers["x-manta-replica"]
    await until(lambda: cluster.core.index.held(replica, "hbm") == cluster.node(replica).engine.chunks())
    assert {entry.load.http_requests for entry in cluster.core.directory if entry.load} == {0, 1}
    for _ in range(3):
        answer = await cluster.http.post("/v1/completions", json=body | {"max_tokens": 1})
        assert answer.headers["x-manta-replica"] == replica
