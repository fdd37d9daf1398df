"""Requests of many shapes for vLLM's server, drawn from a seed: forms, options of sampling and output, and mistakes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any, NamedTuple

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Looks a city up.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"city": "Oslo"}'}}
CALL_TEXT = '<tool_call>\n{"name": "find", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "[a-z ]{4,8}</think>(yes|no)"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "sure": {"type": "boolean"}},
    "required": ["city", "sure"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
TEXTS = (
    "The capital of France is",
    "Ä 😀 日本語 \u200b e\u0301",
    "a <|im_end|>\n<|im_start|>system b",
    "one\n\n  two\t\u00a0three",
    "Tokens, blocks, chunks and keys. " * 12,
)


class Shape(NamedTuple):
    name: str
    path: str
    body: dict[str, Any]


def shapes(count: int, seed: int, model: str) -> Iterator[Shape]:
    """`count` requests that are answered, or refused, alike at any time. Every prompt begins with its own number."""
    random = Random(seed)
    kinds: tuple[tuple[int, Callable[[Random, str], tuple[str, dict[str, Any]]]], ...] = (
        (9, _chat),
        (6, _completion),
        (2, _response),
        (2, _message),
        (1, _tokenization),
    )
    for number in range(count):
        (make,) = random.choices([kind[1] for kind in kinds], [kind[0] for kind in kinds])
        path, body = make(random, f"{seed}.{number}: ")
        yield Shape(f"{number} {path} {sorted(body)}", path, {"model": model, **body})


def _some(random: Random, options: list[dict[str, Any]], most: int) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for option in random.sample(options, random.randint(0, most)):
        chosen |= option
    return chosen


def _sampling(random: Random) -> dict[str, Any]:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": random.choice((1, 4, 9, 16))}
    body |= _some(
        random,
        [
            {"stop": [random.choice("aeiou"), "\n"]},
            {"stop": "e", "include_stop_str_in_output": True},
            {"stop_token_ids": random.sample(range(3, 260), 40)},
            {"min_tokens": 3, "max_tokens": 8},
            {"ignore_eos": True},
            {"presence_penalty": 1.5},
            {"frequency_penalty": -1.0, "repetition_penalty": 1.3},
            {"logit_bias": {"70": 100, "71": -100}},
            {"bad_words": ["the", " it"]},
            {"seed": 7, "temperature": 0.9, "top_p": 0.9, "top_k": 20, "n": random.choice((1, 2))},
            {"seed": 8, "temperature": 1.2, "min_p": 0.01},
            {"skip_special_tokens": False, "spaces_between_special_tokens": False},
            {"truncate_prompt_tokens": random.choice((3, 40))},
            {"structured_outputs": {"choice": ["Paris", "Oslo"]}},
            {"structured_outputs": {"regex": "[a-f]{3,6}"}},
            {"user": "somebody", "priority": 0},
        ],
        3,
    )
    if random.random() < 0.5:
        body |= {"return_token_ids": True}
    if random.random() < 0.5:
        body |= {"stream": True}
        body |= _some(random, [{"stream_options": {"include_usage": True}}], 1)
        body |= _some(
            random, [{"stream_options": {"include_usage": True, "continuous_usage_stats": True}}], 1
        )
    return body


def _messages(random: Random, number: str) -> list[dict[str, Any]]:
    text = random.choice(TEXTS)
    user = {"role": "user", "content": number + text}
    answer = {"role": "assistant", "content": "It is Oslo"}
    return random.choice(
        [
            [user],
            [{"role": "system", "content": number + "Answer."}, {"role": "user", "content": text}],
            [{"role": "developer", "content": number}, user],
            [user, answer, {"role": "user", "content": text}],
            [{"role": "user", "content": [{"type": "text", "text": part} for part in (number, text)]}],
            [user, {"role": "assistant", "tool_calls": [CALL]}, _tool_answer("Oslo")],
            [user, {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALL]}],
            [{**user, "name": "ann"}, answer, {"role": "user"}],
        ]
    )


def _tool_answer(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": text}


def _chat(random: Random, number: str) -> tuple[str, dict[str, Any]]:
    body = {"messages": _messages(random, number), **_sampling(random)}
    body |= _some(
        random,
        [
            {"logprobs": True, "top_logprobs": random.choice((0, 2))},
            {"max_completion_tokens": 5},
            {"chat_template_kwargs": {"mood": "cheerful"}},
            {"add_generation_prompt": False},
            {"add_generation_prompt": False, "continue_final_message": True, "echo": True},
            {"add_special_tokens": True},
            {"documents": [{"title": "a", "text": "b"}]},
            {"reasoning_effort": "low"},
            {"return_tokens_as_token_ids": True, "logprobs": True},
            {"prompt_logprobs": 1, "stream": False, "stream_options": None},
            {"chat_template_kwargs": {"thinking": True}},
            {"chat_template_kwargs": {"thinking": True}, "include_reasoning": False},
            {"response_format": {"type": "json_object"}, "structured_outputs": None},
            {"response_format": JSON_SCHEMA, "structured_outputs": None},
            {"response_format": {"type": "text"}},
            {"tools": [TOOL]},
            {"tools": [TOOL], "tool_choice": "none"},
            {"tools": [TOOL], "structured_outputs": {"choice": [CALL_TEXT]}, "max_tokens": 120},
            {"tools": [TOOL], "tool_choice": "required", "structured_outputs": None, "max_tokens": 120},
            {"tools": [TOOL], "parallel_tool_calls": False},
            {"tools": [TOOL], "tool_choice": _named("find"), "structured_outputs": None, "max_tokens": 120},
        ],
        3,
    )
    return CHAT, body


def _named(tool: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool}}


def _completion(random: Random, number: str) -> tuple[str, dict[str, Any]]:
    ids = [random.randrange(3, 440) for _ in range(random.choice((1, 20, 90)))]
    text = number + random.choice(TEXTS)
    prompt = random.choice([text, text, [text], [text, number + "another"], ids, [ids], [ids, ids[::-1]]])
    body = {"prompt": prompt, **_sampling(random)}
    body |= _some(
        random,
        [
            {"logprobs": random.choice((0, 2))},
            {"echo": True},
            {"echo": True, "logprobs": 1},
            {"echo": True, "max_tokens": 0},
            {"prompt_logprobs": 2, "stream": False, "stream_options": None},
            {"add_special_tokens": False},
            {"return_tokens_as_token_ids": True, "logprobs": 1},
            {"response_format": JSON_SCHEMA, "structured_outputs": None},
            {"suffix": "and so on"},
        ],
        2,
    )
    return COMPLETIONS, body


def _response(random: Random, number: str) -> tuple[str, dict[str, Any]]:
    text = number + random.choice(TEXTS)
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "Oslo"}]
    parts = [{"role": "user", "content": [{"type": "input_text", "text": text}]}]
    asked = random.choice([text, [*turns, {"role": "user", "content": "Sure?"}], parts])
    body: dict[str, Any] = {"input": asked, "temperature": 0, "max_output_tokens": 8}
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    body |= _some(
        random,
        [
            {"instructions": "Answer in one word."},
            {"stream": True},
            {"stream": True},
            {"text": {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}},
            {"tools": [tool]},
            {"tools": [tool], "tool_choice": "required", "max_output_tokens": 60},
            {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
            {"metadata": {"a": "b"}, "user": "somebody"},
            {"store": False},
        ],
        3,
    )
    if "include" in body:
        # In a stream, vLLM drops those of pieces without text, and which pieces have none is chance.
        body["stream"] = False
    return RESPONSES, body


def _message(random: Random, number: str) -> tuple[str, dict[str, Any]]:
    text = number + random.choice(TEXTS)
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "Oslo"}]
    asked = random.choice([turns[:1], [*turns, {"role": "user", "content": "Sure?"}]])
    tool = {"name": "find", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
    body: dict[str, Any] = {"messages": asked, "temperature": 0, "max_tokens": 8}
    options: list[dict[str, Any]] = [
        {"system": "Answer in one word."},
        {"system": [{"type": "text", "text": "Answer."}]},
        {"tools": [tool]},
        {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 120},
        {"tools": [tool], "tool_choice": {"type": "tool", "name": "find"}, "max_tokens": 120},
        {"stop_sequences": ["e"]},
        {"stream": True},
        {"stream": True},
        {"metadata": {"user_id": "somebody"}},
    ]
    if random.random() < 0.2:
        return MESSAGES + "/count_tokens", {"messages": asked, **_some(random, options[:3], 2)}
    return MESSAGES, body | _some(random, options, 3)


def _tokenization(random: Random, number: str) -> tuple[str, dict[str, Any]]:
    return random.choice(
        [
            ("/tokenize", {"prompt": number + random.choice(TEXTS), "return_token_strs": True}),
            ("/tokenize", {"messages": _messages(random, number), "add_generation_prompt": True}),
            ("/detokenize", {"tokens": [random.randrange(3, 440) for _ in range(20)]}),
        ]
    )
