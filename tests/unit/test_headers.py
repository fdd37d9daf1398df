"""Which headers cross the router, in either direction."""

from __future__ import annotations

from typing import Any

import pytest

from router.headers import ResponseHead, request_head
from router.upstream import Address

HERE = Address("127.0.0.1", 8001)


def scope(*headers: tuple[bytes, bytes], method: str = "POST", **more: Any) -> dict[str, Any]:
    return {"method": method, "path": "/v1/a b", "raw_path": b"/v1/a%20b", "headers": headers, **more}


def lines(head: bytes) -> list[bytes]:
    assert head.endswith(b"\r\n\r\n")
    return head.removesuffix(b"\r\n\r\n").split(b"\r\n")


def test_request_line_keeps_the_raw_path_and_the_query():
    head = request_head(scope(method="DELETE", query_string=b"a=%20&b"), HERE, 0)
    assert lines(head) == [b"DELETE /v1/a%20b?a=%20&b HTTP/1.1", b"host: 127.0.0.1:8001"]


def test_path_is_quoted_where_the_server_gives_no_raw_one():
    assert (
        lines(request_head({**scope(method="GET"), "raw_path": None}, HERE, 0))[0]
        == b"GET /v1/a%20b HTTP/1.1"
    )


def test_length_is_the_forwarded_bodys_own():
    head = request_head(scope((b"content-length", b"5"), (b"transfer-encoding", b"chunked")), HERE, 812)
    assert lines(head)[2:] == [b"content-length: 812"]
    assert lines(request_head(scope(), HERE, 0))[2:] == [b"content-length: 0"]


@pytest.mark.parametrize(
    "name",
    [
        b"host",
        b"connection",
        b"keep-alive",
        b"te",
        b"trailer",
        b"upgrade",
        b"expect",
        b"proxy-authorization",
        b"authorization",
        b"x-api-key",
        b"accept-encoding",
        b"X-Manta-Secret",
        b"x-manta-cache-salt",
    ],
)
def test_headers_that_are_not_for_the_replica_are_dropped(name):
    head = request_head(scope((name, b"zzz"), (b"x-kept", b"1"), method="GET"), HERE, 0)
    assert lines(head)[1:] == [b"host: 127.0.0.1:8001", b"x-kept: 1"]


def test_headers_named_by_the_clients_connection_header_are_dropped():
    head = request_head(scope((b"connection", b"close, X-Mine"), (b"x-mine", b"1"), method="GET"), HERE, 0)
    assert lines(head)[1:] == [b"host: 127.0.0.1:8001"]


def test_repeated_headers_keep_their_order():
    head = request_head(scope((b"cookie", b"a"), (b"x", b"1"), (b"cookie", b"b"), method="GET"), HERE, 0)
    assert lines(head)[2:] == [b"cookie: a", b"x: 1", b"cookie: b"]


def test_internal_headers_replace_the_clients_of_that_name():
    internal = [(b"x-manta-secret", b"ours"), (b"X-Request-Id", b"r1")]
    head = request_head(
        scope((b"x-manta-secret", b"forged"), (b"x-request-id", b"c"), method="GET"), HERE, 0, internal
    )
    assert lines(head)[2:] == [b"x-manta-secret: ours", b"x-request-id: r1"]


@pytest.mark.parametrize("value", [b"a\r\nx-manta-secret: b", b"a\nb", b"a\rb", b"a\0b"])
def test_values_that_would_break_the_framing_are_refused(value):
    with pytest.raises(ValueError, match="x-evil"):
        request_head(scope((b"x-evil", value)), HERE, 0)
    with pytest.raises(ValueError, match="x-evil"):
        request_head(scope(), HERE, 0, [(b"x-evil", value)])


@pytest.mark.parametrize("name", [b"", b"a b", b"a:b", b"a\r\nb"])
def test_names_that_would_break_the_framing_are_refused(name):
    with pytest.raises(ValueError, match="header"):
        request_head(scope((name, b"1")), HERE, 0)


@pytest.mark.parametrize("target", [b"/a b", b"/a\r\nx: y", b"/\x7f"])
def test_targets_that_would_break_the_framing_are_refused(target):
    with pytest.raises(ValueError, match="request line"):
        request_head({**scope(), "raw_path": target}, HERE, 0)
    with pytest.raises(ValueError, match="request line"):
        request_head({**scope(), "query_string": target}, HERE, 0)


def test_response_loses_what_is_internal_or_of_the_hop():
    head = ResponseHead.of(
        200,
        [
            (b"date", b"now"),
            (b"server", b"uvicorn"),
            (b"connection", b"x-gone"),
            (b"x-gone", b"1"),
            (b"transfer-encoding", b"chunked"),
            (b"x-manta-cached", b"hbm=512,computed=98"),
            (b"x-manta-tokens", b"1"),
            (b"content-type", b"Text/Event-Stream; charset=utf-8"),
            (b"set-cookie", b"a"),
            (b"set-cookie", b"b"),
        ],
    )
    assert head.headers == [
        (b"content-type", b"Text/Event-Stream; charset=utf-8"),
        (b"set-cookie", b"a"),
        (b"set-cookie", b"b"),
    ]
    assert head.event_stream
    assert head.content_length is None
    assert head.cached == "hbm=512,computed=98"


def test_response_keeps_its_length():
    head = ResponseHead.of(422, [(b"content-length", b"2"), (b"content-type", b"application/json")])
    assert head.headers == [(b"content-length", b"2"), (b"content-type", b"application/json")]
    assert (head.content_length, head.event_stream, head.cached) == (2, False, None)
