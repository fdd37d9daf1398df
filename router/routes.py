"""Which of a replica's paths clients may reach, and by which methods.

A list of what is let through, not of what is kept out: vLLM's server also has paths that change an engine (adapters,
weights, sleeping), and they must not be reachable because nobody thought of them.
"""

from __future__ import annotations

import re

_POST = ("POST",)
_GET = ("GET",)

PATHS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": _POST,
    "/v1/chat/completions/batch": _POST,
    "/v1/completions": _POST,
    "/v1/responses": _POST,
    "/v1/messages": _POST,
    "/v1/messages/count_tokens": _POST,
    "/v1/embeddings": _POST,
    "/v1/score": _POST,
    "/v1/rerank": _POST,
    "/v1/models": _GET,
    "/v2/embed": _POST,
    "/v2/rerank": _POST,
    "/classify": _POST,
    "/pooling": _POST,
    "/score": _POST,
    "/rerank": _POST,
    "/tokenize": _POST,
    "/detokenize": _POST,
    "/version": _GET,
}

RESPONSE_ID = "/v1/responses/{id}"
RESPONSE_CANCEL = "/v1/responses/{id}/cancel"
_STORED_RESPONSE = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel)?")

ROUTES: tuple[str, ...] = (*PATHS, RESPONSE_ID, RESPONSE_CANCEL)
"""Every route by the name that metrics count it under."""


def find(path: str) -> tuple[str, tuple[str, ...]] | None:
    """Name and methods of the route of a path; None for a path that is not served."""
    if path in PATHS:
        return path, PATHS[path]
    stored = _STORED_RESPONSE.fullmatch(path)
    if stored is None:
        return None
    return (RESPONSE_CANCEL, _POST) if stored[2] else (RESPONSE_ID, _GET)


def stored_response(path: str) -> str | None:
    """The response id in the path of a stored response."""
    stored = _STORED_RESPONSE.fullmatch(path)
    return stored[1] if stored is not None else None


def is_anthropic(path: str) -> bool:
    """Whether clients of a path expect errors in the shape of Anthropic's API."""
    return path.startswith("/v1/messages")
