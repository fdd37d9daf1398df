"""Requests that are refused: most in the words of vLLM, some in the words of the router."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.cluster.request_shapes import CHAT, COMPLETIONS, MESSAGES, RESPONSES, TOOL

USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class Refused(NamedTuple):
    path: str
    body: bytes | dict[str, Any]


SAME: dict[str, Refused] = {
    "chat without messages": Refused(CHAT, {}),
    "messages that are a text": Refused(CHAT, {"messages": "hi"}),
    "a message that is a text": Refused(CHAT, {"messages": ["hi"]}),
    "a message without a role": Refused(CHAT, {"messages": [{"content": "hi"}]}),
    "a tokens limit of zero": Refused(CHAT, {"messages": [USER], "max_tokens": 0}),
    "a tokens limit below zero": Refused(CHAT, {"messages": [USER], "max_tokens": -1}),
    "a tokens limit that is a text": Refused(CHAT, {"messages": [USER], "max_tokens": "many"}),
    "a temperature below zero": Refused(CHAT, {"messages": [USER], "temperature": -1}),
    "top_p above one": Refused(CHAT, {"messages": [USER], "top_p": 2}),
    "no choices": Refused(CHAT, {"messages": [USER], "n": 0}),
    "several choices of a greedy answer": Refused(CHAT, {"messages": [USER], "n": 2, "temperature": 0}),
    "top_logprobs without logprobs": Refused(CHAT, {"messages": [USER], "top_logprobs": 2}),
    "too many logprobs": Refused(CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 1000}),
    "options of a stream that is none": Refused(
        CHAT, {"messages": [USER], "stream_options": {"include_usage": True}}
    ),
    "a tool choice without tools": Refused(CHAT, {"messages": [USER], "tool_choice": "required"}),
    "an unknown tool": Refused(
        CHAT,
        {
            "messages": [USER],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "x"}},
        },
    ),
    "a schema that is none": Refused(
        CHAT,
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}},
        },
    ),
    "a response format without a schema": Refused(
        CHAT, {"messages": [USER], "response_format": {"type": "json_schema"}}
    ),
    "a regular expression that is none": Refused(
        CHAT, {"messages": [USER], "structured_outputs": {"regex": "(("}}
    ),
    "two grammars": Refused(
        CHAT, {"messages": [USER], "structured_outputs": {"regex": "a", "choice": ["a"]}}
    ),
    "generation prompt and continuation": Refused(
        CHAT, {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True}
    ),
    "a template of the client's": Refused(CHAT, {"messages": [USER], "chat_template": "{{ 1 }}"}),
    "a bias for no token": Refused(CHAT, {"messages": [USER], "logit_bias": {"999999": 1}}),
    "an image for a model of text": Refused(CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
    "a part of an unknown type": Refused(
        CHAT, {"messages": [{"role": "user", "content": [{"type": "smell"}]}]}
    ),
    "a chat that is too long": Refused(CHAT, {"messages": [{"role": "user", "content": "long " * 3000}]}),
    "a limit beyond the context": Refused(CHAT, {"messages": [USER], "max_tokens": 100_000}),
    "a completion without a prompt": Refused(COMPLETIONS, {}),
    "an empty prompt": Refused(COMPLETIONS, {"prompt": []}),
    "an empty text": Refused(COMPLETIONS, {"prompt": ""}),
    "a prompt that is a number": Refused(COMPLETIONS, {"prompt": 5}),
    "a token beyond the vocabulary": Refused(COMPLETIONS, {"prompt": [999_999]}),
    "a token below zero": Refused(COMPLETIONS, {"prompt": [-1]}),
    "a suffix": Refused(COMPLETIONS, {"prompt": "hi", "suffix": "there"}),
    "echo of prompt embeddings": Refused(COMPLETIONS, {"prompt_embeds": "AAAA", "echo": True}),
    "too many log probabilities": Refused(COMPLETIONS, {"prompt": "hi", "logprobs": 1000}),
    "log probabilities below zero": Refused(COMPLETIONS, {"prompt": "hi", "logprobs": -2}),
    "a prompt that is too long": Refused(COMPLETIONS, {"prompt": [5] * 3000}),
    "a text that is too long": Refused(COMPLETIONS, {"prompt": "long " * 3000}),
    "prompt logprobs of a stream": Refused(
        COMPLETIONS, {"prompt": "hi", "stream": True, "prompt_logprobs": 1}
    ),
    "a response without input": Refused(RESPONSES, {}),
    "a response with a limit below zero": Refused(RESPONSES, {"input": "hi", "max_output_tokens": -1}),
    "a message without a limit": Refused(MESSAGES, {"messages": [USER]}),
    "a message with an unknown role": Refused(
        MESSAGES, {"max_tokens": 1, "messages": [{"role": "x", "content": "a"}]}
    ),
    "embeddings of a model that generates": Refused("/v1/embeddings", {"input": "hi"}),
    "a score of a model that generates": Refused("/v1/score", {"text_1": "a", "text_2": "b"}),
    "a rank of a model that generates": Refused("/v1/rerank", {"query": "a", "documents": ["b"]}),
    "a class of a model that generates": Refused("/classify", {"input": "hi"}),
    "pooling of a model that generates": Refused("/pooling", {"input": "hi"}),
    "nothing to tokenise": Refused("/tokenize", {}),
    "text to detokenise": Refused("/detokenize", {"tokens": "hi"}),
    "a batch without conversations": Refused(CHAT + "/batch", {"messages": []}),
    "an unknown model": Refused(CHAT, {"messages": [USER], "model": "other"}),
    "an unknown model of a completion": Refused(COMPLETIONS, {"prompt": "a", "model": "other"}),
    "an unknown model of a response": Refused(RESPONSES, {"input": "a", "model": "other"}),
    "an unknown model of a message": Refused(
        MESSAGES, {"max_tokens": 1, "messages": [USER], "model": "other"}
    ),
    "an unknown model to tokenise with": Refused("/tokenize", {"prompt": "a", "model": "other"}),
}


class Own(NamedTuple):
    """The status is vLLM's, the words are not."""

    refused: Refused
    why: str
    says: str


OWN: dict[str, Own] = {
    "no JSON": Own(Refused(CHAT, b"{"), "says where the JSON breaks off", "line 1 column 2"),
    "no text": Own(Refused(COMPLETIONS, b"\xff"), "says which byte is not UTF-8", "byte 0"),
    "a list": Own(Refused(CHAT, b"[]"), "says what a body is", "needed: a JSON object"),
    "an empty conversation": Own(
        Refused(CHAT, {"messages": []}), "names the field in `param`", '"param":"messages"'
    ),
    "an unknown response": Own(
        Refused(RESPONSES, {"input": "hi", "previous_response_id": "resp_0"}),
        "says how responses are stored",
        "VLLM_ENABLE_RESPONSES_API_STORE",
    ),
    "an id that is none": Own(
        Refused(RESPONSES, {"input": "hi", "previous_response_id": "hello"}),
        "no replica is asked for more than whether it holds a response",
        "'hello' not found",
    ),
}
