"""The renderer of the simulated engine, and what every renderer makes of a body."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.render_sim import SimRenderer
from router.errors import ApiError
from router.render import CHAT_PATH, COMPLETIONS_PATH, Rendered
from workers.sim.tokens import decode, encode, render_chat

LIMIT = 4096
USER = {"role": "user", "content": "What is the capital of France?"}
IMAGE = {"type": "image_url", "image_url": {"url": "http://images/1.png"}}


def render(path: str, body: Any) -> Rendered:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asyncio.run(SimRenderer(LIMIT).render(path, data))


def refused(path: str, body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        render(path, body)
    return caught.value


def prompts_of(rendered: Rendered) -> list[array[int]]:
    assert rendered.prompts is not None
    return rendered.prompts


def test_a_chat_gives_the_engines_own_tokens() -> None:
    messages = [{"role": "system", "content": "Be brief. Ä 😀"}, USER]
    tools = [{"type": "function", "function": {"name": "lookup"}}]
    rendered = render(CHAT_PATH, {"model": "sim", "messages": messages, "tools": tools})
    expected = render_chat(messages, tools).tokens
    assert rendered == Rendered("sim", [expected], shareable=(len(expected),))


def test_an_open_final_message_is_continued() -> None:
    messages = [USER, {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert decode(prompts_of(render(CHAT_PATH, body))[0]).endswith("It is")
    without = prompts_of(render(CHAT_PATH, {"messages": messages, "add_generation_prompt": False}))[0]
    assert without == render_chat(messages, add_generation_prompt=False).tokens


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("one two", [encode("one two")]),
        ([7, 8, 9], [array("I", [7, 8, 9])]),
        (["one", "two"], [encode("one"), encode("two")]),
        ([[7, 8], [2**32 - 1]], [array("I", [7, 8]), array("I", [2**32 - 1])]),
    ],
    ids=["text", "ids", "texts", "lists of ids"],
)
def test_every_form_of_a_completion_prompt_is_rendered(prompt: Any, expected: list[array[int]]) -> None:
    rendered = render(COMPLETIONS_PATH, {"prompt": prompt})
    assert rendered.prompts == expected
    assert rendered.shareable == tuple(map(len, expected))


def test_the_shareable_prefix_ends_before_the_first_image() -> None:
    parts = [{"type": "text", "text": "Look:"}, IMAGE, {"type": "text", "text": "and"}, IMAGE]
    rendered = render(CHAT_PATH, {"messages": [USER, {"role": "user", "content": parts}]})
    shared, end = prompts_of(rendered)[0], rendered.shareable[0]
    assert 0 < end < len(shared)
    assert decode(shared[:end]).endswith("Look:")
    assert "image" in decode(shared[end:])


def test_an_image_at_the_start_leaves_nothing_of_its_message_to_share() -> None:
    messages = [{"role": "user", "content": [IMAGE, {"type": "text", "text": "x" * 1000}]}]
    rendered = render(CHAT_PATH, {"messages": messages})
    assert rendered.shareable[0] < 10


def test_the_cache_salt_changes_no_token() -> None:
    plain = render(CHAT_PATH, {"messages": [USER]})
    salted = render(CHAT_PATH, {"messages": [USER], "cache_salt": "mine"})
    assert (plain.prompts, plain.client_salt) == (salted.prompts, None)
    assert salted.client_salt == "mine"


def test_what_the_router_plans_with_is_read_from_the_body() -> None:
    body = {"messages": [USER], "stream": True, "max_tokens": 9, "max_completion_tokens": 5, "n": 3}
    rendered = render(CHAT_PATH, body)
    assert (rendered.stream, rendered.max_tokens, rendered.n) == (True, 5, 3)
    assert render(CHAT_PATH, {"messages": [USER]}).max_tokens is None
    assert render(COMPLETIONS_PATH, {"prompt": "x"}).max_tokens == 16


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/responses", {"model": "m", "input": "x", "stream": True}, "path"),
        ("/tokenize", {"model": "m", "prompt": "x", "stream": True}, "path"),
        (COMPLETIONS_PATH, {"model": "m", "prompt_embeds": "AAAA", "stream": True}, "prompt_embeds"),
    ],
)
def test_other_forms_pass_untouched_and_say_why(path: str, body: Any, reason: str) -> None:
    assert render(path, body) == Rendered("m", None, reason, stream=True)


@pytest.mark.parametrize("body", [b"", b"--boundary\r\nbinary \xff", b"[1]", b"[" * 100_000, b"{"])
def test_a_body_for_another_path_need_not_be_json(body: bytes) -> None:
    assert render("/v1/audio/transcriptions", body) == Rendered(None, None, "path")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT_PATH, b'{"model": ', "line 1 column 11 (char 10)"),
        (CHAT_PATH, b"", "char 0"),
        (CHAT_PATH, b'{"a": "\xff"}', "byte 7"),
        (CHAT_PATH, b"[" * 100_000, "nested too deeply"),
        (CHAT_PATH, b'{"seed": ' + b"9" * 5000 + b"}", "4300"),
        (CHAT_PATH, [1], "found an array; needed: a JSON object"),
        (CHAT_PATH, b"null", "found null"),
        (CHAT_PATH, {"messages": []}, "at least one message"),
        (CHAT_PATH, {"model": "sim"}, "messages"),
        (CHAT_PATH, {"messages": "hi"}, "messages"),
        (CHAT_PATH, {"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHAT_PATH, {"messages": [USER], "n": 0}, "n: found 0"),
        (CHAT_PATH, {"messages": [USER], "max_tokens": "many"}, "max_tokens: found 'many'"),
        (CHAT_PATH, {"messages": [USER], "tools": {"a": 1}}, "tools: found dict"),
        (COMPLETIONS_PATH, {}, "Either prompt or prompt_embeds"),
        (COMPLETIONS_PATH, {"prompt": ""}, "cannot be empty"),
        (COMPLETIONS_PATH, {"prompt": []}, "Either prompt or prompt_embeds"),
        (COMPLETIONS_PATH, {"prompt": ["a", ""]}, "cannot be empty"),
        (COMPLETIONS_PATH, {"prompt": [1, "a"]}, "prompt: needed"),
        (COMPLETIONS_PATH, {"prompt": [-1]}, "prompt: needed"),
        (COMPLETIONS_PATH, {"prompt": [2**32]}, "prompt: needed"),
        (COMPLETIONS_PATH, {"prompt": [True]}, "prompt: needed"),
        (COMPLETIONS_PATH, {"prompt": {"text": "a"}}, "prompt"),
    ],
)
def test_what_no_engine_would_take_is_a_400_that_says_what(path: str, body: Any, words: str) -> None:
    error = refused(path, body)
    assert error.status == 400
    assert words in error.message


def test_too_long_a_prompt_is_a_400_with_limit_and_length() -> None:
    error = refused(COMPLETIONS_PATH, {"prompt": [[1], [1] * (LIMIT + 3)]})
    assert error.status == 400
    assert error.message.startswith(
        "This model's maximum context length is 4096 tokens. However, your prompt contains 4099 input tokens"
    )
    assert len(prompts_of(render(COMPLETIONS_PATH, {"prompt": [1] * LIMIT}))[0]) == LIMIT


async def test_a_large_body_leaves_the_loop_free() -> None:
    text = "word " * (1 << 18)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    rendered = await SimRenderer(1 << 20).render(COMPLETIONS_PATH, json.dumps({"prompt": text}).encode())
    turning.cancel()
    assert prompts_of(rendered)[0] == encode(text)
    assert turns > 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = """
model messages prompt role content type text tools tool_calls n stream max_tokens cache_salt image_url
prompt_embeds continue_final_message
"""
fields = st.sampled_from(FIELDS.split())
bodies = st.recursive(
    json_values,
    lambda inner: st.dictionaries(fields, inner, max_size=6) | st.lists(inner, max_size=3),
    max_leaves=12,
)


def outcome(path: str, body: Any) -> Rendered | ApiError:
    try:
        return render(path, body)
    except ApiError as error:
        return error


@given(path=st.sampled_from((CHAT_PATH, COMPLETIONS_PATH, "/v1/responses")), body=bodies)
def test_any_json_is_rendered_passed_or_refused_with_a_4xx(path: str, body: Any) -> None:
    answer = outcome(path, body)
    if isinstance(answer, ApiError):
        assert 400 <= answer.status < 500
        assert json.loads(answer.body())["error"]["message"]
        return
    assert (answer.prompts is None) == bool(answer.reason)
    for tokens, shareable in zip(answer.prompts or [], answer.shareable, strict=True):
        assert 0 <= shareable <= len(tokens) <= LIMIT
        assert len(tokens) > 0
