"""Errors: OpenAI's shape as vLLM fills it, and headers that tell a client what to do."""

from __future__ import annotations

import json

import pytest

from router import errors
from router.errors import ApiError

CASES = [
    (errors.unknown_model("gpt-9", ["smol", "smol-lora"]), 404, "NotFoundError", "model"),
    (errors.bad_request("messages is empty", "messages"), 400, "BadRequestError", "messages"),
    (errors.malformed_json("unexpected end at byte 17"), 400, "Bad Request", "body"),
    (errors.context_too_long(8192, 9000), 400, "BadRequestError", "input_tokens"),
    (errors.unauthorized("no key"), 401, "AuthenticationError", None),
    (errors.not_found("/v2/nothing"), 404, "Not Found", None),
    (errors.method_not_allowed("PUT", ["GET", "POST"]), 405, "Method Not Allowed", None),
    (errors.body_too_large(1024, 2048), 413, "RequestTooLargeError", None),
    (errors.queue_full("1024 requests wait", 0.2), 429, "RateLimitError", None),
    (errors.no_replica("none is ready", 5), 503, "ServiceUnavailableError", None),
    (errors.upstream_failed("connection reset"), 502, "BadGatewayError", None),
    (errors.upstream_timeout("first token", 600), 504, "GatewayTimeoutError", None),
]


@pytest.mark.parametrize(("error", "status", "type", "param"), CASES, ids=lambda v: getattr(v, "type", None))
def test_every_error_has_the_shape_of_vllm(
    error: ApiError, status: int, type: str, param: str | None
) -> None:
    body = json.loads(error.body())
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"] == {"message": error.message, "type": type, "param": param, "code": status}
    headers = dict(error.headers())
    assert headers[b"content-type"] == b"application/json"
    assert int(headers[b"content-length"]) == len(error.body())
    assert error.status == status


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, b"1"), (0.2, b"1"), (1.0, b"1"), (1.01, b"2"), (59.5, b"60")]
)
def test_retry_after_is_whole_seconds_and_at_least_one(seconds: float, header: bytes) -> None:
    for error in (errors.queue_full("full", seconds), errors.no_replica("none", seconds)):
        assert dict(error.headers())[b"retry-after"] == header


def test_only_refusals_that_pass_ask_to_come_back() -> None:
    with_retry = {error.status for error, *_ in CASES if b"retry-after" in dict(error.headers())}
    assert with_retry == {429, 503}


def test_messages_say_what_was_found_and_what_is_needed() -> None:
    assert errors.unknown_model("gpt-9", ["smol"]).message == (
        "The model `gpt-9` does not exist. Valid aliases: smol."
    )
    too_long = errors.context_too_long(8192, 9000).message
    assert "maximum context length is 8192 tokens" in too_long
    assert "contains 9000 input tokens" in too_long
    assert "1024 bytes, found 2048 bytes" in errors.body_too_large(1024, 2048).message
    assert "1024 bytes, found more" in errors.body_too_large(1024).message


def test_a_refused_method_or_key_names_what_would_do() -> None:
    assert dict(errors.method_not_allowed("PUT", ["GET", "HEAD"]).headers())[b"allow"] == b"GET, HEAD"
    assert dict(errors.unauthorized("no key").headers())[b"www-authenticate"].startswith(b"Bearer")


def test_what_a_client_sent_is_echoed_short_and_encodable() -> None:
    error = errors.unknown_model("\ud800" + "x" * 1_000_000, ["smol"])
    assert len(error.body()) < 1000
    assert json.loads(error.body())["error"]["message"].startswith("The model `?xxx")


def test_clients_of_the_messages_api_get_errors_in_its_shape() -> None:
    error = errors.queue_full("full", 3)
    error.anthropic = True
    body = json.loads(error.body())
    assert body == {"type": "error", "error": {"type": "RateLimitError", "message": error.message}}
    headers = dict(error.headers())
    assert int(headers[b"content-length"]) == len(error.body())
    assert headers[b"retry-after"] == b"3"
