"""The bodies of answers, field by field as vLLM's OpenAI server writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from workers.sim.sequence import Output

DONE = b"data: [DONE]\n\n"


class Usage(NamedTuple):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    def as_dict(self, full: bool) -> dict[str, Any]:
        """`full` as in an answer that is no stream, with the fields that hold nothing."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self.cached_tokens is not None:
            details: dict[str, Any] = {"cached_tokens": self.cached_tokens}
            if full:
                details |= {"created_cache_tokens": None, "multimodal_tokens": None}
            usage["prompt_tokens_details"] = details
        if full:
            usage["completion_tokens_details"] = None
        return usage


class Choice(NamedTuple):
    """A whole sequence."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_token_ids: list[int]


class Answer(Protocol):
    """How one answer is written. Token ids are None where the client did not ask for them."""

    def opening(self, choices: int, prompt_token_ids: list[int] | None) -> list[dict[str, Any]]:
        """Chunks before the first token."""

    def chunk(
        self, index: int, output: Output, token_ids: list[int] | None, prompt_token_ids: list[int] | None
    ) -> dict[str, Any]: ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...

    def whole(self, choices: Sequence[Choice], usage: Usage, with_token_ids: bool) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ChatAnswer:
    id: str
    created: int
    model: str

    def opening(self, choices: int, prompt_token_ids: list[int] | None) -> list[dict[str, Any]]:
        role = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": index, "delta": role, "logprobs": None, "finish_reason": None}])
            | {"prompt_token_ids": prompt_token_ids, "prompt_text": None}
            for index in range(choices)
        ]

    def chunk(
        self, index: int, output: Output, token_ids: list[int] | None, prompt_token_ids: list[int] | None
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "delta": {"content": output.text},
            "logprobs": None,
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason is not None:
            choice["stop_reason"] = output.stop_reason
        choice["token_ids"] = token_ids
        return self._chunk([choice])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage.as_dict(full=False)}

    def whole(self, choices: Sequence[Choice], usage: Usage, with_token_ids: bool) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [_message_choice(*numbered, with_token_ids) for numbered in enumerate(choices)],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage.as_dict(full=True),
            "prompt_logprobs": None,
            "prompt_token_ids": choices[0].prompt_token_ids if with_token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass(frozen=True)
class CompletionAnswer:
    id: str
    created: int
    model: str

    def opening(self, choices: int, prompt_token_ids: list[int] | None) -> list[dict[str, Any]]:
        return []

    def chunk(
        self, index: int, output: Output, token_ids: list[int] | None, prompt_token_ids: list[int] | None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": output.text,
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "prompt_token_ids": prompt_token_ids,
            "token_ids": token_ids,
        }
        return self._chunk([choice])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage.as_dict(full=False)}

    def whole(self, choices: Sequence[Choice], usage: Usage, with_token_ids: bool) -> dict[str, Any]:
        return {
            **self._chunk([_text_choice(*numbered, with_token_ids) for numbered in enumerate(choices)]),
            "service_tier": None,
            "system_fingerprint": None,
            "usage": usage.as_dict(full=True),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _message_choice(index: int, choice: Choice, with_token_ids: bool) -> dict[str, Any]:
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        },
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if with_token_ids else None,
        "routed_experts": None,
    }


def _text_choice(index: int, choice: Choice, with_token_ids: bool) -> dict[str, Any]:
    return {
        "index": index,
        "text": choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids if with_token_ids else None,
        "prompt_logprobs": None,
        "prompt_token_ids": choice.prompt_token_ids if with_token_ids else None,
        "routed_experts": None,
    }


def model_list(names: Sequence[str], max_model_len: int, created: int) -> dict[str, Any]:
    """The base model's name first, then its adapters'."""
    base = names[0]
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": name,
                "parent": None if name == base else base,
                "max_model_len": max_model_len if name == base else None,
                "permission": [],
            }
            for name in names
        ],
    }


def error(status: int, kind: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
