"""Token ids of the router inside a real engine: nothing is rendered twice, and no answer changes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import pytest

from cluster.render_vllm import VllmRenderer
from router.render import CHAT_PATH, COMPLETIONS_PATH
from tests.engine.conftest import CONTEXT, MODEL, TinyServer
from tests.engine.test_render_vllm import FORMS, IMAGE, PARIS, USER
from workers.request_record import RequestRecord, current_request
from workers.vllm.prompt_adapter import PromptAdapterError, install, set_salt

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

GREEDY = {"model": MODEL, "max_tokens": 8, "temperature": 0, "return_token_ids": True}


@pytest.fixture
def tokenizer_calls(server: TinyServer, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts calls of the tokenizer that turn text or messages into something else."""
    from transformers import PreTrainedTokenizerBase

    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(PreTrainedTokenizerBase, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(self, *args, **kwargs)

        return call

    for name in ("__call__", "encode", "apply_chat_template"):
        monkeypatch.setattr(PreTrainedTokenizerBase, name, counted(name))
    return calls


async def record_for(
    renderer: VllmRenderer, path: str, body: dict[str, Any], salt: str = ""
) -> RequestRecord:
    rendered = await renderer.render(path, json.dumps(body).encode())
    assert rendered.prompts is not None
    return RequestRecord("r", prompts=[list(ids) for ids in rendered.prompts], salt=salt)


def essence(answer: httpx.Response) -> Any:
    """An answer without what differs from request to request."""
    assert answer.status_code == 200, answer.text
    return [
        {key: value for key, value in choice.items() if key != "tool_calls"}
        for choice in answer.json()["choices"]
    ] + [answer.json()["usage"]["prompt_tokens"]]


@pytest.mark.parametrize(("path", "form"), FORMS)
async def test_answers_are_those_without_the_router(
    server: TinyServer, renderer: VllmRenderer, path: str, form: dict[str, Any]
) -> None:
    body = GREEDY | form
    plain = await server.post(path, body)
    record = await record_for(renderer, path, body)
    substituted, mismatched = server.adapter.substituted, server.adapter.mismatched
    adapted = await server.post(path, body, record)
    assert essence(adapted) == essence(plain)
    assert server.adapter.mismatched == mismatched
    by_ids = path == COMPLETIONS_PATH and not isinstance(form["prompt"][0], str)
    assert server.adapter.substituted == substituted + (0 if by_ids else len(record.prompts or ()))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, {"messages": [USER, PARIS, USER]}),
        (COMPLETIONS_PATH, {"prompt": "The capital of France is"}),
        (COMPLETIONS_PATH, {"prompt": ["one", "two"]}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_neither_tokenises_nor_applies_a_template(
    server: TinyServer,
    renderer: VllmRenderer,
    tokenizer_calls: Counter[str],
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    body = GREEDY | body | {"stream": stream}
    record = await record_for(renderer, path, body)
    tokenizer_calls.clear()
    assert (await server.post(path, body)).status_code == 200
    assert tokenizer_calls.total() > 0
    tokenizer_calls.clear()
    assert (await server.post(path, body, record)).status_code == 200
    assert tokenizer_calls.total() == 0


async def test_the_ids_come_from_the_record_and_not_from_the_body(server: TinyServer) -> None:
    ids = [7, 8, 9, 10]
    server.inputs.clear()
    record = RequestRecord("r", prompts=[ids])
    await server.post(CHAT_PATH, GREEDY | {"messages": [USER]}, record)
    await server.post(COMPLETIONS_PATH, GREEDY | {"prompt": "something else"}, record)
    assert [given["prompt_token_ids"] for given in server.inputs] == [ids, ids]
    assert record.prompts == [ids]


async def test_echo_gives_the_text_back(server: TinyServer, renderer: VllmRenderer) -> None:
    texts = ["one two", "three"]
    body = GREEDY | {"prompt": texts, "echo": True, "return_token_ids": False}
    plain = await server.post(COMPLETIONS_PATH, body)
    record = await record_for(renderer, COMPLETIONS_PATH, body)
    adapted = await server.post(COMPLETIONS_PATH, body, record)
    assert essence(adapted) == essence(plain)
    for choice, text in zip(adapted.json()["choices"], texts, strict=True):
        assert choice["text"].startswith(text)


async def test_echo_of_a_chat_gives_the_open_message_back(server: TinyServer, renderer: VllmRenderer) -> None:
    body = GREEDY | {"messages": [USER, PARIS], "echo": True, "return_token_ids": False}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    plain = await server.post(CHAT_PATH, body)
    adapted = await server.post(CHAT_PATH, body, await record_for(renderer, CHAT_PATH, body))
    assert essence(adapted) == essence(plain)
    assert adapted.json()["choices"][0]["message"]["content"].startswith(PARIS["content"])


@pytest.mark.parametrize(("salt", "expected"), [("tenant", "tenant"), ("", None)])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT_PATH, {"messages": [USER]}),
        (COMPLETIONS_PATH, {"prompt": "one"}),
        (COMPLETIONS_PATH, {"prompt": [5, 6]}),
    ],
)
@pytest.mark.parametrize("rendered", [True, False])
async def test_the_records_salt_replaces_the_clients(
    server: TinyServer,
    renderer: VllmRenderer,
    path: str,
    body: dict[str, Any],
    salt: str,
    expected: str | None,
    rendered: bool,
) -> None:
    body = GREEDY | body | {"cache_salt": "chosen-by-the-client"}
    record = await record_for(renderer, path, body, salt) if rendered else RequestRecord("r", salt=salt)
    await server.post(path, body, record)
    assert server.inputs[-1].get("cache_salt") == expected


async def test_without_a_record_the_clients_salt_stays(server: TinyServer) -> None:
    await server.post(CHAT_PATH, GREEDY | {"messages": [USER], "cache_salt": "mine"})
    assert server.inputs[-1]["cache_salt"] == "mine"


async def test_salts_part_the_engines_cache(server: TinyServer) -> None:
    body = GREEDY | {"prompt": [11] * 300}

    async def cached(salt: str) -> int:
        answer = await server.post(COMPLETIONS_PATH, body, RequestRecord("r", salt=salt))
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)

    assert await cached("one") == 0
    assert await cached("one") > 0
    assert await cached("two") == 0


async def test_a_salt_is_set_on_every_part_of_an_input() -> None:
    part = {"type": "token", "cache_salt": "client"}
    both = {"type": "enc_dec", "encoder_prompt": dict(part), "decoder_prompt": dict(part)}
    token = current_request.set(RequestRecord("r", salt="tenant"))
    try:
        set_salt(both)
        set_salt("a prompt that is a text")
    finally:
        current_request.reset(token)
    assert both["decoder_prompt"] == both["encoder_prompt"] == {"type": "token", "cache_salt": "tenant"}
    set_salt(part)
    assert part["cache_salt"] == "client"


@pytest.mark.parametrize(
    ("path", "body", "prompts"),
    [
        (CHAT_PATH, {"messages": [USER]}, [[5], [6]]),
        (CHAT_PATH, {"messages": [USER]}, []),
        (CHAT_PATH, {"messages": [USER]}, [[]]),
        (COMPLETIONS_PATH, {"prompt": ["one", "two"]}, [[5]]),
    ],
)
async def test_ids_that_do_not_fit_are_not_used_but_counted(
    server: TinyServer, path: str, body: dict[str, Any], prompts: list[list[int]]
) -> None:
    plain = await server.post(path, GREEDY | body)
    mismatched = server.adapter.mismatched
    adapted = await server.post(path, GREEDY | body, RequestRecord("r", prompts=prompts))
    assert essence(adapted) == essence(plain)
    assert server.adapter.mismatched == mismatched + 1


async def test_a_chat_with_an_image_is_rendered_by_the_engine(server: TinyServer) -> None:
    body = GREEDY | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]}
    plain = await server.post(CHAT_PATH, body)
    adapted = await server.post(CHAT_PATH, body, RequestRecord("r", prompts=[[5, 6]]))
    assert plain.status_code == adapted.status_code == 400
    assert adapted.json() == plain.json()


async def test_vllms_limits_hold_for_the_routers_ids(server: TinyServer) -> None:
    long = RequestRecord("r", prompts=[[5] * (CONTEXT + 7)])
    for path, body in ((CHAT_PATH, {"messages": [USER]}), (COMPLETIONS_PATH, {"prompt": "one"})):
        answer = await server.post(path, GREEDY | body, long)
        assert answer.status_code == 400
        assert f"{CONTEXT + 7} input tokens" in answer.json()["error"]["message"]
        cut = await server.post(path, GREEDY | body | {"truncate_prompt_tokens": 3}, long)
        assert cut.json()["usage"]["prompt_tokens"] == 3


async def test_requests_at_one_time_keep_to_their_own_ids(server: TinyServer) -> None:
    async def ask(number: int) -> list[int]:
        record = RequestRecord(str(number), prompts=[[10 + number] * 4])
        answer = await server.post(CHAT_PATH, GREEDY | {"messages": [USER]}, record)
        return list(answer.json()["prompt_token_ids"])

    answers = await asyncio.gather(*map(ask, range(16)))
    assert answers == [[10 + number] * 4 for number in range(16)]


async def test_a_renderer_of_another_shape_is_refused_by_name(vllm_environment: None) -> None:
    import vllm

    class Renamed:
        async def render_messages_async(self, conversation: Any) -> None: ...

    with pytest.raises(
        PromptAdapterError, match=r"Renamed\.render_messages_async: found arguments"
    ) as caught:
        install(Renamed())
    assert vllm.__version__ in str(caught.value)
    with pytest.raises(PromptAdapterError, match="needed: a coroutine function"):
        install(object())
