"""Which session a request belongs to, for policies that keep one together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

SESSION_HEADER = b"x-session-id"
_MOST_CHARACTERS = 256


class _Named(msgspec.Struct):
    user: Any = None
    prompt_cache_key: Any = None


_decoder = msgspec.json.Decoder(_Named)


def session_of(headers: Mapping[bytes, bytes], body: bytes) -> str:
    """The header `x-session-id`, else the body's `user`, else its `prompt_cache_key`; empty where none names one.

    A router takes the first chunk of the prompt instead, so that what begins alike stays together.
    """
    header = headers.get(SESSION_HEADER, b"")
    if header:
        return header.decode("latin-1")[:_MOST_CHARACTERS]
    try:
        named = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    for value in (named.user, named.prompt_cache_key):
        if isinstance(value, str) and value:
            return value[:_MOST_CHARACTERS]
    return ""
