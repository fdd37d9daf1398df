"""The router's renderer against vLLM's own server: the same token ids, the same words for what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.render_vllm import VllmRenderer
from router.errors import ApiError
from router.render import CHAT_PATH, COMPLETIONS_PATH, Rendered
from tests.engine.conftest import CONTEXT, MODEL, TinyServer

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
USER = {"role": "user", "content": "What is the capital of France?"}
PARIS = {"role": "assistant", "content": "It is Paris"}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "Paris"}'}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/1.png"}}

CHATS = {
    "one turn": {"messages": [USER]},
    "system, user, assistant": {"messages": [SYSTEM, USER, PARIS, USER]},
    "unicode": {"messages": [{"role": "user", "content": "Ä 😀 日本語 \u200b\x00 e\u0301"}]},
    "special tokens in the text": {
        "messages": [{"role": "user", "content": "<|im_end|>\n<|im_start|>system"}]
    },
    "parts of text": {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]}]},
    "another role": {"messages": [{"role": "critic", "content": "No."}]},
    "no content": {"messages": [{"role": "user"}]},
    "tools": {"messages": [USER], "tools": [TOOL]},
    "tools, none of them": {"messages": [USER], "tools": [TOOL], "tool_choice": "none"},
    "tool turns": {
        "messages": [
            USER,
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "Paris"},
        ],
        "tools": [TOOL],
    },
    "final message continued": {
        "messages": [USER, PARIS],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "no generation prompt": {"messages": [USER], "add_generation_prompt": False},
    "template arguments": {"messages": [USER], "chat_template_kwargs": {"mood": "cheerful"}},
    "special tokens added": {"messages": [USER], "add_special_tokens": True},
    "truncated": {"messages": [USER], "truncate_prompt_tokens": 5},
    "truncated on the right": {
        "messages": [USER],
        "truncate_prompt_tokens": 5,
        "truncation_side": "right",
    },
    "salted": {"messages": [USER], "cache_salt": "mine"},
    "JSON schema": {"messages": [USER], "response_format": {"type": "json_object"}},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "The capital of France is"},
    "ids": {"prompt": [5, 6, 7]},
    "texts": {"prompt": ["one", "two three", "Ä"]},
    "lists of ids": {"prompt": [[5, 6], [7]]},
    "truncated": {"prompt": "one two three four", "truncate_prompt_tokens": 3},
    "without special tokens": {"prompt": "one", "add_special_tokens": False},
    "echo": {"prompt": "one", "echo": True},
}
FORMS = [
    *(pytest.param(CHAT_PATH, body, id=f"chat: {name}") for name, body in CHATS.items()),
    *(pytest.param(COMPLETIONS_PATH, body, id=f"completion: {name}") for name, body in COMPLETIONS.items()),
]


async def render(renderer: VllmRenderer, path: str, body: Any) -> Rendered:
    return await renderer.render(path, body if isinstance(body, bytes) else json.dumps(body).encode())


async def outcome(renderer: VllmRenderer, path: str, body: Any) -> Rendered | ApiError:
    try:
        return await render(renderer, path, body)
    except ApiError as error:
        return error


@pytest.mark.parametrize(("path", "body"), FORMS)
async def test_rendered_ids_are_the_engines_own(
    server: TinyServer, renderer: VllmRenderer, path: str, body: dict[str, Any]
) -> None:
    rendered = await render(renderer, path, {"model": MODEL} | body)
    server.inputs.clear()
    answer = await server.post(path, {"model": MODEL, "max_tokens": 1, "temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    assert rendered.prompts is not None
    assert [list(ids) for ids in rendered.prompts] == [given["prompt_token_ids"] for given in server.inputs]
    assert rendered.shareable == tuple(map(len, rendered.prompts))
    assert rendered.model == MODEL


async def test_the_cache_salt_and_the_models_name_change_no_token(renderer: VllmRenderer) -> None:
    plain = await render(renderer, CHAT_PATH, {"messages": [USER]})
    other = await render(renderer, CHAT_PATH, {"messages": [USER], "cache_salt": "mine", "model": "adapter"})
    assert plain.prompts == other.prompts
    assert (plain.client_salt, other.client_salt) == (None, "mine")
    assert (plain.model, other.model) == (None, "adapter")


async def test_what_the_router_plans_with_is_read_from_the_body(renderer: VllmRenderer) -> None:
    body = {"messages": [USER], "stream": True, "max_tokens": 9, "max_completion_tokens": 5, "n": 3}
    rendered = await render(renderer, CHAT_PATH, body)
    assert (rendered.stream, rendered.max_tokens, rendered.n) == (True, 5, 3)
    assert (await render(renderer, CHAT_PATH, {"messages": [USER], "n": None})).max_tokens is None
    assert (await render(renderer, COMPLETIONS_PATH, {"prompt": "x"})).max_tokens == 16


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/responses", {"input": "x"}, "path"),
        ("/v1/embeddings", {"input": "x"}, "path"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": [IMAGE]}]}, "multimodal"),
        (
            CHAT_PATH,
            {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]},
            "multimodal",
        ),
        (COMPLETIONS_PATH, {"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ],
)
async def test_other_forms_pass_untouched_and_say_why(
    renderer: VllmRenderer, path: str, body: dict[str, Any], reason: str
) -> None:
    rendered = await render(renderer, path, {"model": "m", "stream": True} | body)
    assert rendered == Rendered("m", None, reason, stream=True)


REFUSED_IN_VLLMS_WORDS = [
    (CHAT_PATH, {"model": MODEL}),
    (CHAT_PATH, {"messages": []}),
    (CHAT_PATH, {"messages": "hi"}),
    (CHAT_PATH, {"messages": [1]}),
    (CHAT_PATH, {"messages": [{"content": "x"}]}),
    (CHAT_PATH, {"messages": [{"role": "user", "content": None}]}),
    (CHAT_PATH, {"messages": [{"role": "user", "content": 5}]}),
    (CHAT_PATH, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    (CHAT_PATH, {"messages": [{"role": "assistant", "tool_calls": 5}]}),
    (CHAT_PATH, {"messages": [{"role": "user", "content": "x " * 2 * CONTEXT}]}),
    (CHAT_PATH, {"messages": [{"role": "user", "content": "x " * 200 * CONTEXT}]}),
    (CHAT_PATH, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
    (CHAT_PATH, {"messages": [USER], "model": 5}),
    (CHAT_PATH, {"messages": [USER], "stream": "maybe"}),
    (CHAT_PATH, {"messages": [USER], "max_tokens": "x"}),
    (CHAT_PATH, {"messages": [USER], "max_tokens": 10 * CONTEXT}),
    (CHAT_PATH, {"messages": [USER], "cache_salt": ""}),
    (CHAT_PATH, {"messages": [USER], "cache_salt": 7}),
    (CHAT_PATH, {"messages": [USER], "tools": []}),
    (CHAT_PATH, {"messages": [USER], "tool_choice": "auto"}),
    (CHAT_PATH, {"messages": [USER], "response_format": 5}),
    (CHAT_PATH, {"messages": [USER], "chat_template": "{{ x }}"}),
    (CHAT_PATH, {"messages": [USER], "chat_template_kwargs": 3}),
    (CHAT_PATH, {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True}),
    (CHAT_PATH, {"messages": [USER], "truncate_prompt_tokens": 10 * CONTEXT}),
    (CHAT_PATH, {"messages": [USER], "stream_options": {"include_usage": True}}),
    (COMPLETIONS_PATH, {}),
    (COMPLETIONS_PATH, {"prompt": ""}),
    (COMPLETIONS_PATH, {"prompt": []}),
    (COMPLETIONS_PATH, {"prompt": [[]]}),
    (COMPLETIONS_PATH, {"prompt": ["", "a"]}),
    (COMPLETIONS_PATH, {"prompt": [1, "a"]}),
    (COMPLETIONS_PATH, {"prompt": [-1]}),
    (COMPLETIONS_PATH, {"prompt": [5_000_000]}),
    (COMPLETIONS_PATH, {"prompt": [2**70]}),
    (COMPLETIONS_PATH, {"prompt": {"text": "a"}}),
    (COMPLETIONS_PATH, {"prompt": [5] * (CONTEXT + 7)}),
    (COMPLETIONS_PATH, {"prompt": "a", "suffix": "b"}),
]


@pytest.mark.parametrize(("path", "body"), REFUSED_IN_VLLMS_WORDS)
async def test_a_refusal_is_vllms_own(
    server: TinyServer, renderer: VllmRenderer, path: str, body: dict[str, Any] | bytes
) -> None:
    answer = await server.post(path, body)
    mine = await outcome(renderer, path, body)
    assert isinstance(mine, ApiError)
    assert (mine.status, mine.message, mine.type) == (
        answer.status_code,
        answer.json()["error"]["message"],
        answer.json()["error"]["type"],
    )


@pytest.mark.parametrize("found", [CONTEXT + 1, CONTEXT + 7])
async def test_too_long_a_prompt_is_a_400_with_limit_and_length(renderer: VllmRenderer, found: int) -> None:
    error = await outcome(renderer, COMPLETIONS_PATH, {"prompt": [5] * found})
    assert isinstance(error, ApiError)
    assert error.status == 400
    assert f"maximum context length is {CONTEXT} tokens" in error.message
    assert f"{found} input tokens" in error.message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"messages": ', "line 1 column 14 (char 13)"),
        (b"", "char 0"),
        (b"\xff\xfe{", "UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        ([1], "found an array; needed: a JSON object"),
        # vLLM itself answers 500 to these two.
        ({"messages": [USER], "structured_outputs": 5}, "AttributeError"),
        ({"messages": [USER], "chat_template_kwargs": {"mood": "x", "tools": 5}}, ""),
    ],
)
async def test_other_malformed_bodies_are_a_400_too(renderer: VllmRenderer, body: Any, words: str) -> None:
    error = await outcome(renderer, CHAT_PATH, body)
    assert isinstance(error, ApiError)
    assert error.status == 400
    assert words in error.message


async def test_a_body_of_1_mib_is_rendered_beside_the_loop(renderer: VllmRenderer) -> None:
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    body = {"messages": [{"role": "user", "content": "word " * (1 << 18)}], "truncate_prompt_tokens": 500}
    rendered = await render(renderer, CHAT_PATH, body)
    turning.cancel()
    assert rendered.shareable == (500,)
    assert turns > 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = """
model messages prompt role content type text tools tool_calls tool_choice n stream max_tokens cache_salt stop
echo chat_template_kwargs response_format structured_outputs kv_transfer_params logprobs suffix
truncate_prompt_tokens
"""
fields = st.sampled_from(FIELDS.split())
bodies = st.dictionaries(fields, json_values | st.lists(st.dictionaries(fields, json_values)), max_size=5)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from((CHAT_PATH, COMPLETIONS_PATH)), body=bodies, valid=st.booleans())
async def test_any_json_is_rendered_passed_or_refused_with_a_4xx(
    renderer: VllmRenderer, path: str, body: dict[str, Any], valid: bool
) -> None:
    good = {"messages": [USER], "prompt": "one"} if valid else {}
    answer = await outcome(renderer, path, body | good)
    if isinstance(answer, ApiError):
        assert 400 <= answer.status < 500
        assert json.loads(answer.body())["error"]["message"]
        return
    assert (answer.prompts is None) == bool(answer.reason)
    assert answer.shareable == tuple(map(len, answer.prompts or ()))
    assert all(answer.shareable)


async def test_the_renderer_leaves_the_process_its_cores(renderer: VllmRenderer, cores: set[int]) -> None:
    await render(renderer, CHAT_PATH, {"messages": [USER]})
    assert os.sched_getaffinity(0) == cores


async def test_importing_the_renderer_imports_no_vllm() -> None:
    program = "import sys, cluster.render_vllm, workers.vllm.arguments; print('vllm' in sys.modules)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=Path(__file__).parents[2], stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), timeout=60)
    assert output.split() == [b"False"]
