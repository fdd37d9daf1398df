"""What a request says of the session it belongs to."""

from __future__ import annotations

import pytest

from router.session import session_of

NAMED = b'{"prompt": "p", "user": "u", "prompt_cache_key": "k"}'


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({b"x-session-id": b"s"}, NAMED, "s"),
        ({}, NAMED, "u"),
        ({}, b'{"user": "", "prompt_cache_key": "k"}', "k"),
        ({}, b'{"user": 7, "prompt_cache_key": ["k"]}', ""),
        ({}, b'{"prompt": "p"}', ""),
        ({}, b"no JSON", ""),
        ({}, b"[1]", ""),
        ({}, b'{"user": "\xff"}', ""),
        ({b"x-session-id": b"\xff" * 1000}, b"", "\xff" * 256),
    ],
)
def test_the_header_comes_before_the_user_before_the_cache_key(
    headers: dict[bytes, bytes], body: bytes, session: str
) -> None:
    assert session_of(headers, body) == session
