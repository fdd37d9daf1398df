"""A real model on two replicas: what clients get is what vLLM says when it is asked directly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.cluster.conftest import CPU_ENGINE
from tests.cluster.deployed import Deployed, merged

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(420)]

MODEL = "SmolLM2-135M-Instruct"
LIMIT = 12
SYSTEM = {
    "role": "system",
    "content": "You are a careful guide to the cities of Europe. Answer every question in one short sentence, name "
    "the place that you speak of, and say nothing that you are not sure of. When a question is about the past, say "
    "the year. When it is about food, say where it comes from.",
}


def asks(*texts: str) -> list[dict[str, str]]:
    """A conversation in which user and assistant take turns, the user first and last."""
    roles = ("user", "assistant")
    return [SYSTEM, *({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))]


CONVERSATIONS = {
    "one turn": asks("What is the capital of France?"),
    "other words": [
        {"role": "user", "content": "Name three colours — in capitals, s'il vous plaît: é, 日本."}
    ],
    "several turns": asks("Where is the Prado?", "The Prado is in Madrid.", "Which river flows there?"),
}


@pytest.fixture(scope="module")
def cluster(deploy: Callable[..., Deployed], smollm2: Path) -> Deployed:
    args = {"max-model-len": 2048, "kv-cache-memory-bytes": 256 * 1024 * 1024}
    cluster = deploy(
        {
            "model": {"path": str(smollm2), "name": MODEL},
            "engine": merged(CPU_ENGINE, {"args": args}),
            "cache": {"chunk_tokens": 64},
            "pools": [{"role": "unified", "replicas": 2, "drain_timeout_s": 10, "resources": {"cores": 1}}],
        }
    )
    cluster.ready_replicas(2)
    return cluster


@pytest.fixture(scope="module")
def client(cluster: Deployed) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="any", max_retries=0)


def greedy(**body: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": LIMIT, "temperature": 0, **body}


def directly(cluster: Deployed, path: str, body: dict[str, Any], besides: str = "") -> dict[str, Any]:
    """vLLM's own answer: it renders the request itself. `besides` names a replica that is not asked."""
    replica = next(r for r in cluster.replicas() if r["id"] != besides)
    answer = cluster.ask_replica(replica, "POST", path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_a_chat_says_what_vllm_says_directly(
    cluster: Deployed, client: openai.OpenAI, messages: list[dict[str, str]]
) -> None:
    body = greedy(messages=messages)
    whole = client.chat.completions.create(**body)
    pieces = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    direct = directly(cluster, "/v1/chat/completions", body)

    text = direct["choices"][0]["message"]["content"]
    assert text.strip()
    assert whole.choices[0].message.content == text
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
    for usage in (whole.usage, pieces[-1].usage):
        assert usage is not None
        assert usage.prompt_tokens == direct["usage"]["prompt_tokens"]
        assert usage.completion_tokens == direct["usage"]["completion_tokens"]


def test_it_is_the_real_model(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(**greedy(messages=question))
    assert "Paris" in str(answer.choices[0].message.content)


@pytest.mark.parametrize("prompt", ["Once upon a time, in a", "def fibonacci(n):\n", "1, 2, 3, 4,"])
def test_a_completion_says_what_vllm_says_directly(
    cluster: Deployed, client: openai.OpenAI, prompt: str
) -> None:
    body = greedy(prompt=prompt)
    whole = client.completions.create(**body)
    streamed = "".join(piece.choices[0].text for piece in client.completions.create(**body, stream=True))
    text = directly(cluster, "/v1/completions", body)["choices"][0]["text"]
    assert text.strip()
    assert (whole.choices[0].text, streamed) == (text, text)


def test_a_second_turn_finds_the_first_where_it_was_answered(
    cluster: Deployed, client: openai.OpenAI
) -> None:
    letter = "We are planning weeks of walking between old libraries and want to eat well on the way. " * 8
    opening = [{"role": "user", "content": letter + "Where should we go first?"}]
    create = client.chat.completions.with_raw_response.create
    first = create(**greedy(messages=opening))
    said = {"role": "assistant", "content": first.parse().choices[0].message.content}
    later = [*opening, said, {"role": "user", "content": "And after that?"}]
    turn = greedy(messages=later, extra_body={"return_token_ids": True})
    cluster.wait_idle()
    second = create(**turn)

    replica = first.headers["x-manta-replica"]
    assert second.headers["x-manta-replica"] == replica
    usage = second.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    cached = usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= 128
    assert second.headers["x-manta-cached"] == f"hbm={cached},computed={usage.prompt_tokens - cached}"

    turn |= turn.pop("extra_body")
    uncached = directly(cluster, "/v1/chat/completions", turn, besides=replica)
    assert uncached["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    with_cache = second.parse().model_dump()["choices"][0]
    assert with_cache["token_ids"] == uncached["choices"][0]["token_ids"]
    assert with_cache["message"]["content"] == uncached["choices"][0]["message"]["content"]
