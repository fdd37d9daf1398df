"""A router that is served under a prefix sees the same paths as one at the root."""

from __future__ import annotations

from typing import Any

import pytest

from router.asgi import below_root


def scope(path: str, raw: bytes | None, root: str = "/law") -> dict[str, Any]:
    return {"type": "http", "path": path, "raw_path": raw, "root_path": root, "query_string": b"a=1"}


@pytest.mark.parametrize(
    ("path", "raw", "inner", "inner_raw"),
    [
        ("/law/v1/models", b"/law/v1/models", "/v1/models", b"/v1/models"),
        ("/law/v1/a b", b"/law/v1/a%20b", "/v1/a b", b"/v1/a%20b"),
        ("/law", b"/law", "/", None),
        ("/law/", b"/law/", "/", b"/"),
        ("/law/v1", b"/%6Caw/v1", "/v1", None),
        ("/law/v1", b"/law%2Fv1", "/v1", None),
        ("/law/v1", None, "/v1", None),
        ("/lawful", b"/lawful", "/lawful", b"/lawful"),
        ("/v1/law", b"/v1/law", "/v1/law", b"/v1/law"),
    ],
)
def test_the_prefix_is_taken_off_where_it_stands_and_nowhere_else(
    path: str, raw: bytes | None, inner: str, inner_raw: bytes | None
) -> None:
    found = below_root(scope(path, raw))
    assert (found["path"], found["raw_path"]) == (inner, inner_raw)
    assert found["query_string"] == b"a=1"


def test_at_the_root_a_request_is_left_as_it_is() -> None:
    given = scope("/law/v1", b"/law/v1", root="")
    assert below_root(given) is given
