"""The simulated engine's HTTP answers, held against vLLM's shapes."""

import json

import httpx
import pytest

from cache_store.config import CacheConfig
from workers.config import EngineConfig, ModelConfig, SimConfig
from workers.request_record import RequestRecord, current_request
from workers.sim import answers
from workers.sim.answers import ChatAnswer, CompletionAnswer, Usage
from workers.sim.engine import SimEngine
from workers.sim.sequence import Output
from workers.sim.tokens import encode, render_chat

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "tell me a story"}], "max_tokens": 4}


@pytest.fixture
async def engine():
    sim = SimConfig(prefill_tokens_per_s=1e6, decode_tokens_per_s=1e4, block_tokens=4, max_model_len=200)
    config = EngineConfig(kind="sim", sim=sim)
    engine = SimEngine(config, ModelConfig(name="toy", adapters={"law": "x"}), CacheConfig(chunk_tokens=16))
    await engine.start(lambda events: None)
    yield engine
    assert engine.open_streams == 0
    engine.check_integrity()
    await engine.shutdown()


@pytest.fixture
async def http(engine):
    transport = httpx.ASGITransport(app=engine.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://sim") as client:
        yield client


async def post(http, path, **body):
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def chunks(http, path, **body):
    answer = await http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


async def refused(http, path, status, **body):
    answer = await http.post(path, json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    return error


async def test_a_chat_answer_has_the_fields_of_vllm(http):
    answer = await post(http, "/v1/chat/completions", **CHAT)
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"].split()) == 4
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    prompt = len(render_chat(CHAT["messages"]).tokens)
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 4,
        "total_tokens": prompt + 4,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }


async def test_a_chat_stream_opens_with_the_role_and_ends_with_the_reason(http):
    streamed = await chunks(http, "/v1/chat/completions", **CHAT)
    assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in streamed] == [None] * (len(streamed) - 1) + [
        "length"
    ]
    assert len({chunk["id"] for chunk in streamed}) == 1
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in streamed)
    whole = await post(http, "/v1/chat/completions", **CHAT)
    assert text == whole["choices"][0]["message"]["content"]


def test_chunks_are_byte_for_byte_as_vllm_writes_them():
    chat, completion = ChatAnswer("i", 1, "m"), CompletionAnswer("i", 1, "m")
    head = b'data: {"id":"i","object":"chat.completion.chunk","created":1,"model":"m","choices":['
    text_head = b'data: {"id":"i","object":"text_completion","created":1,"model":"m","choices":['
    usage = (
        b'],"usage":{"prompt_tokens":3,"total_tokens":7,"completion_tokens":4,'
        b'"prompt_tokens_details":{"cached_tokens":2}}}\n\n'
    )
    middle, last = Output("hi ", [1]), Output("hi ", [1], "length")
    written = {
        answers.event(chat.opening(1, None)[0]): head
        + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
        b'"prompt_token_ids":null,"prompt_text":null}\n\n',
        answers.event(chat.chunk(0, middle, None, None)): head
        + b'{"index":0,"delta":{"content":"hi "},"logprobs":null,"finish_reason":null,'
        b'"token_ids":null}]}\n\n',
        answers.event(chat.chunk(0, last, None, None)): head
        + b'{"index":0,"delta":{"content":"hi "},"logprobs":null,"finish_reason":"length","stop_reason":null,'
        b'"token_ids":null}]}\n\n',
        answers.event(chat.usage_chunk(Usage(3, 4, 2))): head + usage,
        answers.event(completion.chunk(0, middle, None, None)): text_head
        + b'{"index":0,"text":"hi ","logprobs":null,"finish_reason":null,"stop_reason":null,'
        b'"prompt_token_ids":null,"token_ids":null}]}\n\n',
        answers.event(completion.usage_chunk(Usage(3, 4, 2))): text_head + usage,
    }
    for ours, vllms in written.items():
        assert ours == vllms


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_comes_last_when_asked_for_and_counts_hits(http, path):
    body = CHAT | {"prompt": "tell me a story about an owl", "stream_options": {"include_usage": True}}
    for cached in (False, True):
        *_, usage = await chunks(http, path, **body)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 4
        assert (usage["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == cached


async def test_continuous_usage_counts_up(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk["usage"]["completion_tokens"]
        for chunk in await chunks(http, "/v1/completions", prompt="go", max_tokens=5, stream_options=options)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_a_completion_has_the_fields_of_vllm(http):
    answer = await post(http, "/v1/completions", model="toy", prompt="once upon")
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["usage"]["completion_tokens"] == 16
    assert set(answer["choices"][0]) >= {"index", "text", "logprobs", "finish_reason", "stop_reason"}


async def test_every_form_of_prompt_gives_the_same_text(http):
    texts = ["a story of the sea", "another"]
    ids = [encode(text).tolist() for text in texts]
    forms = [texts, ids]
    both = [await post(http, "/v1/completions", prompt=form, max_tokens=3) for form in forms]
    single = [await post(http, "/v1/completions", prompt=form, max_tokens=3) for form in (texts[0], ids[0])]
    assert [choice["text"] for choice in both[0]["choices"]] == [
        choice["text"] for choice in both[1]["choices"]
    ]
    assert {answer["choices"][0]["text"] for answer in single} == {both[0]["choices"][0]["text"]}
    assert [choice["index"] for choice in both[0]["choices"]] == [0, 1]


async def test_choices_of_a_prompt_stand_together_and_its_tokens_count_once(http):
    answer = await post(http, "/v1/completions", prompt=["one two", "three four"], n=2, max_tokens=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == len(encode("one two")) + len(encode("three four"))
    assert answer["usage"]["completion_tokens"] == 12
    streamed = await chunks(http, "/v1/completions", prompt=["one two", "three four"], n=2, max_tokens=3)
    for choice in answer["choices"]:
        parts = [each["choices"][0] for each in streamed if each["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]


async def test_a_stream_of_several_choices_opens_each(http):
    streamed = await chunks(http, "/v1/chat/completions", **CHAT, n=3)
    assert [chunk["choices"][0]["index"] for chunk in streamed[:3]] == [0, 1, 2]
    assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in streamed[:3])


async def test_stop_strings_end_the_text_and_are_named(http):
    plain = (await post(http, "/v1/completions", prompt="go", max_tokens=10))["choices"][0]["text"]
    stop = plain[9:14]
    (choice,) = (await post(http, "/v1/completions", prompt="go", max_tokens=10, stop=[stop]))["choices"]
    assert choice["text"] == plain[: plain.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_an_echo_starts_with_the_prompt(http):
    answer = await post(http, "/v1/completions", prompt="say it", echo=True, max_tokens=2)
    assert answer["choices"][0]["text"].startswith("say it")
    first, *_ = await chunks(http, "/v1/completions", prompt="say it", echo=True, max_tokens=2)
    assert first["choices"][0]["text"].startswith("say it")


async def test_token_ids_come_when_asked_for(http):
    prompt = render_chat(CHAT["messages"]).tokens.tolist()
    whole = await post(http, "/v1/chat/completions", **CHAT, return_token_ids=True)
    role, *rest = await chunks(http, "/v1/chat/completions", **CHAT, return_token_ids=True)
    assert whole["prompt_token_ids"] == role["prompt_token_ids"] == prompt
    streamed = [token for chunk in rest for token in chunk["choices"][0]["token_ids"]]
    assert streamed == whole["choices"][0]["token_ids"]
    assert encode(whole["choices"][0]["message"]["content"]).tolist() == streamed


async def test_a_request_id_names_the_answer(http):
    answer = await http.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "abc"})
    assert answer.json()["id"] == "chatcmpl-abc"


async def test_an_answer_sent_back_hits_the_blocks_that_it_left(http):
    first = await post(http, "/v1/chat/completions", **CHAT | {"max_tokens": 40})
    said = first["choices"][0]["message"]
    chat = [
        *CHAT["messages"],
        {"role": "assistant", "content": said["content"]},
        {"role": "user", "content": "more"},
    ]
    second = await post(http, "/v1/chat/completions", **CHAT | {"messages": chat})
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > first["usage"]["prompt_tokens"]


async def test_salts_and_adapters_share_nothing(http):
    prompt = {"prompt": "the same words for everybody who asks", "max_tokens": 1}
    for fields in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"model": "law"}):
        answer = await post(http, "/v1/completions", **prompt, **fields)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, fields


async def test_the_routers_token_ids_and_salt_replace_the_clients(http, engine):
    record = RequestRecord("r", prompts=[encode("other words, other words").tolist()], salt="tenant")
    token = current_request.set(record)
    answer = await post(http, "/v1/chat/completions", **CHAT, cache_salt="mine")
    current_request.reset(token)
    assert answer["usage"]["prompt_tokens"] == record.prompt_tokens == 6
    plain = await post(
        http, "/v1/completions", prompt="other words, other words", max_tokens=4, cache_salt="tenant"
    )
    assert plain["choices"][0]["text"] == answer["choices"][0]["message"]["content"]
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


async def test_token_ids_for_another_number_of_prompts_are_refused(http):
    token = current_request.set(RequestRecord("r", prompts=[[1], [2]]))
    error = await refused(http, "/v1/chat/completions", 400, **CHAT)
    current_request.reset(token)
    assert "2 lists of token ids" in error["message"]


async def test_an_unknown_model_is_a_404(http):
    error = await refused(http, "/v1/chat/completions", 404, **CHAT | {"model": "huge"})
    assert error["type"] == "NotFoundError"
    assert error["param"] == "model"
    assert error["message"] == "The model `huge` does not exist."


async def test_a_prompt_that_is_too_long_names_both_numbers(http):
    error = await refused(http, "/v1/completions", 400, prompt=[1] * 300)
    assert "200 tokens" in error["message"]
    assert "300 input tokens" in error["message"]
    assert error["param"] == "input_tokens"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": "hi"}, "body.messages"),
        ({"max_tokens": "many"}, "body.max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_bad_chats_are_refused_by_the_name_of_the_field(http, fields, param):
    assert (await refused(http, "/v1/chat/completions", 400, **CHAT | fields))["param"] == param


@pytest.mark.parametrize("prompt", [None, "", [], [""], [[]], [-1], [1 << 32], ["a", 5], [[1], "x", {}]])
async def test_bad_prompts_are_refused(http, prompt):
    assert (await refused(http, "/v1/completions", 400, prompt=prompt))["param"] == "prompt"


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b'{"messages": [\xff]}'])
async def test_malformed_json_is_a_400(http, body):
    answer = await http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json; charset=utf-8"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == 400


async def test_a_body_that_is_not_declared_json_is_a_400(http):
    answer = await http.post(
        "/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"}
    )
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]


async def test_unknown_paths_and_methods_are_told_apart(http):
    assert (await http.get("/v1/nothing")).json()["error"]["code"] == 404
    assert (await http.get("/v1/completions")).json()["error"]["code"] == 405


async def test_models_lists_the_base_model_and_its_adapters(http):
    base, adapter = (await http.get("/v1/models")).json()["data"]
    assert (base["id"], base["max_model_len"], base["parent"]) == ("toy", 200, None)
    assert (adapter["id"], adapter["parent"]) == ("law", "toy")


async def test_an_adapter_answers_by_its_public_name_and_with_other_words(http, engine):
    texts = set()
    for name in ("toy", "law", engine.info.adapters["law"]):
        answer = await post(http, "/v1/completions", model=name, prompt="go")
        assert answer["model"] == name.partition("@")[0]
        texts.add(answer["choices"][0]["text"])
    assert len(texts) == 2


async def test_tokenize_and_detokenize_are_inverse(http):
    tokens = await post(http, "/tokenize", model="toy", prompt="héllo wörld", return_token_strs=True)
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 200)
    assert len(tokens["token_strs"]) == tokens["count"]
    assert await post(http, "/detokenize", tokens=tokens["tokens"]) == {"prompt": "héllo wörld"}
    chat = await post(http, "/tokenize", messages=CHAT["messages"])
    assert chat["tokens"] == render_chat(CHAT["messages"]).tokens.tolist()
    assert (await refused(http, "/detokenize", 400, tokens=[-1]))["param"] == "tokens"
    await refused(http, "/tokenize", 400, model="toy")
    await refused(http, "/tokenize", 404, model="huge", prompt="x")


async def test_metrics_count_what_was_done(http):
    for _ in range(2):
        await post(http, "/v1/completions", prompt="the same prompt for both", max_tokens=3)
    rows = dict(
        line.rsplit(" ", 1)
        for line in (await http.get("/metrics")).text.splitlines()
        if not line.startswith("#")
    )
    assert float(rows['vllm:generation_tokens_total{model_name="toy"}']) == 6
    assert float(rows['vllm:prompt_tokens_total{model_name="toy"}']) == 12
    assert float(rows['vllm:prefix_cache_hits_total{model_name="toy"}']) == 4
    assert float(rows['vllm:num_requests_running{model_name="toy"}']) == 0


async def test_health_follows_the_engine(http):
    assert (await http.get("/health")).status_code == 200
    await post(http, "/sim/fault", fault="unhealthy")
    assert (await http.get("/health")).status_code == 503


async def test_refused_requests_get_a_503_and_then_service_again(http):
    await post(http, "/sim/fault", fault="refuse", count=1)
    assert (await refused(http, "/v1/chat/completions", 503, **CHAT))["type"] == "ServiceUnavailableError"
    await post(http, "/v1/chat/completions", **CHAT)


async def test_a_fault_that_does_not_exist_is_refused(http):
    assert "explode" in (await refused(http, "/sim/fault", 400, fault="explode"))["message"]
