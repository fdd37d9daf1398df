"""Errors as clients see them: shape, types and, where it has them, words of vLLM's OpenAI server."""

from __future__ import annotations

import math
from collections.abc import Iterable
from http import HTTPStatus

import msgspec

_MAX_ECHO_CHARS = 200


class ApiError(Exception):
    """An answer that is an error. `body` and `headers` are what goes on the wire."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str,
        param: str | None = None,
        code: int | None = None,
        retry_after_s: float | None = None,
        extra_headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = status if code is None else code
        self.retry_after_s = retry_after_s
        self._extra_headers = tuple(extra_headers)
        self.anthropic = False
        """Answer in the shape of Anthropic's messages API."""

    def body(self) -> bytes:
        # A lone surrogate, which JSON input can carry, has no UTF-8.
        message = self.message.encode("utf-8", "replace").decode()
        if self.anthropic:
            return msgspec.json.encode({"type": "error", "error": {"type": self.type, "message": message}})
        error = {"message": message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """For ASGI: names in lower case."""
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self.body())).encode()),
            *self._extra_headers,
        ]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode()))
        return headers


def unknown_model(model: str, served: Iterable[str]) -> ApiError:
    """`served`: the names that clients may ask for."""
    names = ", ".join(served)
    message = f"The model `{_echo(model)}` does not exist. Valid aliases: {names}."
    return ApiError(404, message, "NotFoundError", param="model")


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, "BadRequestError", param=param)


def malformed_json(reason: str) -> ApiError:
    """`reason`: what the parser said, with the place."""
    return ApiError(400, f"The body is not valid JSON: {reason}", HTTPStatus.BAD_REQUEST.phrase, param="body")


def context_too_long(limit: int, found: int) -> ApiError:
    """`limit`: tokens that the model takes; `found`: tokens of the prompt."""
    message = (
        f"This model's maximum context length is {limit} tokens. However, your prompt contains {found} input "
        "tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt."
    )
    return ApiError(400, message, "BadRequestError", param="input_tokens")


def unauthorized(reason: str) -> ApiError:
    return ApiError(
        401, reason, "AuthenticationError", extra_headers=[(b"www-authenticate", b'Bearer realm="manta"')]
    )


def not_found(path: str) -> ApiError:
    return ApiError(404, f"Not Found: no such path as {_echo(path)}", HTTPStatus.NOT_FOUND.phrase)


def method_not_allowed(method: str, allowed: Iterable[str]) -> ApiError:
    names = ", ".join(allowed)
    return ApiError(
        405,
        f"Method Not Allowed: found {_echo(method)}, needed one of: {names}",
        HTTPStatus.METHOD_NOT_ALLOWED.phrase,
        extra_headers=[(b"allow", names.encode())],
    )


def body_too_large(limit_bytes: int, found_bytes: int | None = None) -> ApiError:
    """`found_bytes`: None where the client did not say and was cut off at the limit."""
    found = "more" if found_bytes is None else f"{found_bytes} bytes"
    message = f"The body may have {limit_bytes} bytes, found {found}."
    return ApiError(413, message, "RequestTooLargeError", extra_headers=[(b"connection", b"close")])


def queue_full(reason: str, retry_after_s: float) -> ApiError:
    return ApiError(429, f"The cluster is busy: {reason}.", "RateLimitError", retry_after_s=retry_after_s)


def no_replica(reason: str, retry_after_s: float) -> ApiError:
    return ApiError(
        503, f"No replica can answer now: {reason}.", "ServiceUnavailableError", retry_after_s=retry_after_s
    )


def internal(kind: str) -> ApiError:
    """A fault of ours; `kind` is what a person may look for in the router's log."""
    return ApiError(500, f"The router failed: {kind}.", "InternalServerError")


def unknown_response(response: str) -> ApiError:
    """No replica holds it for this tenant. Engines store responses only where they are told to."""
    message = (
        f"Response with id '{_echo(response)}' not found. Responses are stored in the memory of the replica that made "
        "them, and only with VLLM_ENABLE_RESPONSES_API_STORE=1 in engine.env."
    )
    return ApiError(404, message, "invalid_request_error", param="response_id")


def upstream_failed(reason: str) -> ApiError:
    """Every replica that was tried failed before its first token."""
    return ApiError(502, f"The replica failed: {reason}.", "BadGatewayError")


def upstream_timeout(what: str, limit_s: float) -> ApiError:
    """`what`: what did not come, as in "first token"."""
    return ApiError(504, f"The replica gave no {what} within {limit_s:g} s.", "GatewayTimeoutError")


def _echo(text: str) -> str:
    """What the client sent, short enough to send back."""
    return text if len(text) <= _MAX_ECHO_CHARS else text[:_MAX_ECHO_CHARS] + "..."
