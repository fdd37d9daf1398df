"""What a body for /admin/cache may name, and what it is told when it names nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import ApiError
from router.named_chunks import (
    DEFAULT_WAIT_S,
    AllNamed,
    KeysNamed,
    PromptNamed,
    check_tenant,
    node_named,
    parse_named,
    parse_warm,
)
from router.render import CHAT_PATH, COMPLETIONS_PATH

KEY = "0a" * 32
MESSAGES = [{"role": "user", "content": "hi"}]


def named(**fields: Any) -> PromptNamed | KeysNamed | AllNamed:
    return parse_named(json.dumps(fields).encode(), may_be_all=True)


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"prompt": "hi"}, COMPLETIONS_PATH),
        ({"prompt": [1, 2, 2**32 - 1]}, COMPLETIONS_PATH),
        ({"messages": MESSAGES, "tools": [{"type": "function"}], "cache_salt": "s"}, CHAT_PATH),
        (
            {"messages": MESSAGES, "add_generation_prompt": False, "chat_template_kwargs": {"a": None}},
            CHAT_PATH,
        ),
    ],
)
def test_a_prompt_is_rendered_from_all_that_was_said_of_it_but_the_tenant(
    fields: dict[str, Any], path: str
) -> None:
    found = named(model="m", tenant="red", **fields)
    assert isinstance(found, PromptNamed)
    assert (found.path, found.tenant) == (path, "red")
    assert json.loads(found.body) == {"model": "m", **fields}


def test_keys_are_taken_once_each_in_their_order_and_in_either_case() -> None:
    found = named(keys=[KEY, "ff" * 32, KEY.upper()])
    assert found == KeysNamed([bytes.fromhex(KEY), b"\xff" * 32])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "Expected `object`"),
        (b"{}", "exactly one of prompt, messages, keys, all"),
        (b'{"prompt": "a", "messages": []}', "exactly one"),
        (b'{"prompt": "a", "all": true}', "exactly one"),
        (b'{"keys": ["%s"], "all": true}' % KEY.encode(), "exactly one"),
        (b'{"all": false}', "exactly one"),
        (b'{"prompt": ["a", "b"]}', "Expected `int`"),
        (b'{"prompt": [-1]}', ">= 0"),
        (b'{"prompt": null}', "Expected"),
        (b'{"keys": []}', "length >= 1"),
        (b'{"keys": ["0a"]}', "regex"),
        (b'{"keys": ["%s "]}' % KEY.encode(), "regex"),
        (b'{"keys": ["%s\\n"]}' % KEY.encode(), "regex"),
        (b'{"keys": ["%s"], "model": "m"}' % KEY.encode(), "model: goes with a prompt"),
        (b'{"all": true, "tenant": "red"}', "tenant: goes with a prompt"),
        (b'{"prompt": "a", "max_tokens": 1}', "unknown field `max_tokens`"),
        (b'{"prompt": "a", "kv_transfer_params": {}}', "unknown field"),
        (b'{"prompt": "a", "tenant": 1}', "Expected `str`"),
    ],
)
def test_a_body_that_names_nothing_certain_is_refused_with_the_reason(body: bytes, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_named(body, may_be_all=True)
    assert refused.value.status == 400
    assert said in refused.value.message


@pytest.mark.parametrize("body", [b'{"all": true}', b'{"keys": ["%s"], "all": true}' % KEY.encode()])
def test_all_is_for_evict_alone(body: bytes) -> None:
    assert parse_named(b'{"all": true}', may_be_all=True) == AllNamed()
    with pytest.raises(ApiError, match=r"prompt, messages, keys$"):
        parse_named(body)


FIELDS = st.sampled_from(["prompt", "messages", "keys", "all", "tenant", "model", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner),
)


@given(JSON, st.sampled_from([parse_named, parse_warm]))
def test_any_json_is_named_or_refused(value: object, parse: Callable[[bytes], object]) -> None:
    status = 400
    try:
        parse(json.dumps(value).encode())
    except ApiError as error:
        status = error.status
    assert status == 400


def test_a_request_to_warm_asks_for_one_token_and_keeps_what_makes_its_prompt() -> None:
    body = {
        "messages": MESSAGES, "model": "m", "tools": [], "max_tokens": 900, "max_completion_tokens": 900, "n": 4,
        "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "tenant": "red", "seed": 1,
    }  # fmt: skip
    found = parse_warm(json.dumps(body).encode())
    assert (found.prompt.path, found.prompt.tenant, found.wait_s) == (CHAT_PATH, "red", DEFAULT_WAIT_S)
    assert json.loads(found.prompt.body) == {
        "messages": MESSAGES, "model": "m", "tools": [], "seed": 1, "max_tokens": 1, "stream": False,
    }  # fmt: skip


@pytest.mark.parametrize("wait_s", [-1, 61, "5", None, True, float("nan")])
def test_a_wait_has_bounds(wait_s: object) -> None:
    with pytest.raises(ApiError, match=r"wait_s: found .*; needed: seconds from 0 to 60"):
        parse_warm(json.dumps({"prompt": "a", "wait_s": wait_s}).encode())


def test_tenants_are_named_where_there_are_any_and_only_there() -> None:
    assert check_tenant(None, []) == ""
    assert check_tenant("red", ["red", "blue"]) == "red"
    for given_name, known, status, said in (
        (None, ["red", "blue"], 400, "Tenants: blue, red."),
        ("green", ["red"], 404, "'green' does not exist. Tenants: red."),
        ("green", [], 404, "There are none: leave it out."),
    ):
        with pytest.raises(ApiError) as refused:
            check_tenant(given_name, known)
        assert (refused.value.status, refused.value.param) == (status, "tenant")
        assert said in refused.value.message


def test_a_node_may_be_cut_short_while_it_is_one() -> None:
    nodes = dict.fromkeys(("abc", "abd", "ab"))
    assert [node_named(name, nodes) for name in ("abc", "ab")] == ["abc", "ab"]
    assert node_named("f", {"f00d": None}) == "f00d"
    for name, status in (("a", 409), ("x", 404), ("", 404)):
        with pytest.raises(ApiError) as refused:
            node_named(name, {"abc": None, "abd": None})
        assert refused.value.status == status
