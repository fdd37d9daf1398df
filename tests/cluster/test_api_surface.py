"""All that vLLM's server offers for text, through the router: official clients, and the same bytes as without it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.cluster.deployed import Deployed
from tests.cluster.request_shapes import (
    CALL_TEXT,
    CHAT,
    COMPLETIONS,
    JSON_SCHEMA,
    MESSAGES,
    RESPONSES,
    THOUGHT,
    TOOL,
    Shape,
    shapes,
)
from tests.cluster.sameness import Answer, difference, normalised
from tests.cluster.tokenizer_count import COUNT_PATH
from tests.tiny_model import make_tiny_model
from workers.messages import SALT_HEADER

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(300)]

CONTEXT = 2048
SHAPES = 200
USER = {"role": "user", "content": "Which city?"}
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% if mood is defined %}<|im_start|>mood\n{{ mood }}<|im_end|>\n{% endif %}"
    "{% if documents %}<|im_start|>documents\n{{ documents | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['reasoning'] %}<think>{{ message['reasoning'] }}</think>{% endif %}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinking")
    return make_tiny_model(folder / "tiny", added=("<think>", "</think>"), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def cluster(deploy_vllm: Callable[..., Deployed], model: Path) -> Deployed:
    cluster = deploy_vllm(
        model={"path": str(model)},
        engine={
            "args": {
                "max-model-len": CONTEXT,
                "enable-auto-tool-choice": True,
                "tool-call-parser": "hermes",
                "reasoning-parser": "deepseek_v3",
                "middleware": ["tests.cluster.tokenizer_count.TokenizerCount"],
                # A random model would fill an answer with the blanks that a grammar allows, and never end a thought.
                "structured-outputs-config": {
                    "disable_any_whitespace": True,
                    "backend": "xgrammar",
                    "enable_in_reasoning": True,
                },
            },
            "env": {"VLLM_ENABLE_RESPONSES_API_STORE": "1"},
        },
        router={"tenants": {"a": {"api_keys": ["key-a"]}, "b": {"api_keys": ["key-b"]}}},
    )
    cluster.http.headers["authorization"] = "Bearer key-a"
    cluster.ready_replicas(2)
    return cluster


@pytest.fixture(scope="module")
def client(cluster: Deployed) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="key-a", max_retries=0)


@pytest.fixture(scope="module")
def claude(cluster: Deployed) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=cluster.endpoint, api_key="key-a", max_retries=0)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    defaults = {"model": "tiny", "messages": [USER], "max_tokens": 60, "temperature": 0}
    return client.chat.completions.create(**defaults | options)


def metric(cluster: Deployed, name: str) -> float:
    """Sum over the replicas' own metrics."""
    pages = [cluster.ask_replica(replica, "GET", "/metrics").text for replica in cluster.replicas()]
    return sum(float(value) for page in pages for value in re.findall(rf"^{name} (\S+)$", page, re.M))


# Sameness.


def both(cluster: Deployed, path: str, content: bytes) -> tuple[Answer, Answer]:
    """Through the router, and from the replica that it chose. The replica's own answer finds no KV."""
    headers = {"content-type": "application/json"}
    ours = cluster.http.post(path, content=content, headers=headers)
    known = {replica["id"]: replica for replica in cluster.replicas()}
    replica = known.get(ours.headers.get("x-manta-replica"), next(iter(known.values())))
    headers[SALT_HEADER] = uuid.uuid4().hex
    theirs = cluster.ask_replica(replica, "POST", path, content=content, headers=headers)
    return _answer(ours), _answer(theirs)


def _answer(answer: httpx.Response) -> Answer:
    return Answer(answer.status_code, answer.headers.get("content-type", ""), answer.content)


def test_answers_equal_vllms_own(cluster: Deployed) -> None:
    substituted = metric(cluster, "manta_substituted_prompts_total")
    asked = list(shapes(SHAPES, seed=1, model="tiny"))

    def ask(shape: Shape) -> tuple[Answer, Answer]:
        # With a salt of its own, the request finds no KV through the router either.
        body = shape.body | {"cache_salt": uuid.uuid4().hex}
        return both(cluster, shape.path, json.dumps(body).encode())

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask, asked))
    different = [
        f"{shape}\n{found}"
        for shape, (ours, theirs) in zip(asked, answers, strict=True)
        if (found := difference(ours, theirs))
    ]
    assert not different, f"{len(different)} of {SHAPES}:\n\n" + "\n\n".join(different)
    good = [
        shape for shape, (ours, _) in zip(asked, answers, strict=True) if ours.status == 200
    ]
    assert len(good) > SHAPES * 0.75
    texts = sum(_texts(shape.body) for shape in good if shape.path in (CHAT, COMPLETIONS))
    assert texts > SHAPES / 3
    assert metric(cluster, "manta_substituted_prompts_total") - substituted >= texts
    assert metric(cluster, "manta_mismatched_requests_total") == 0


def _texts(body: dict[str, Any]) -> int:
    """Prompts of a body that have to be tokenised."""
    prompt = body.get("prompt", "")
    return 1 if isinstance(prompt, str) else sum(isinstance(item, str) for item in prompt)

    whole = sum(normalised(a.body) == normalised(b.body) for a, b in answers)
    print("byte for byte", whole)
    from collections import Counter
    print(Counter((s.path, a.status) for s, (a, b) in zip(asked, answers)))
    for s, (a, b) in zip(asked, answers):
        if a.status != 200:
            print(s.body, a.body)
