"""All that vLLM's server offers for text, through the router: official clients, and the same bytes as without it."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.cluster import bad_requests
from tests.cluster.bad_requests import Own, Refused
from tests.cluster.deployed import Deployed, wait_for
from tests.cluster.request_shapes import (
    CALL_TEXT,
    CHAT,
    COMPLETIONS,
    JSON_SCHEMA,
    THOUGHT,
    TOOL,
    Shape,
    shapes,
)
from tests.cluster.sameness import Answer, difference
from tests.cluster.tokenizer_count import COUNT_PATH
from tests.tiny_model import VOCAB, make_tiny_model
from workers.messages import SALT_HEADER

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(300)]

CONTEXT = 2048
SHAPES = 200
USER: Any = {"role": "user", "content": "Which city?"}
STRICT_TOOL: dict[str, Any] = TOOL | {"function": {**TOOL["function"], "strict": True}}
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% if mood is defined %}<|im_start|>mood\n{{ mood }}<|im_end|>\n{% endif %}"
    "{% if documents %}<|im_start|>documents\n{{ documents | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['reasoning'] %}<think>{{ message['reasoning'] }}</think>{% endif %}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thinking")
    return make_tiny_model(folder / "tiny", added=("<think>", "</think>"), chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def cluster(deploy_vllm: Callable[..., Deployed], model: Path) -> Deployed:
    cluster = deploy_vllm(
        model={"path": str(model)},
        engine={
            "args": {
                "max-model-len": CONTEXT,
                "enable-auto-tool-choice": True,
                "tool-call-parser": "hermes",
                "reasoning-parser": "deepseek_v3",
                "middleware": ["tests.cluster.tokenizer_count.TokenizerCount"],
                # A random model would fill an answer with the blanks that a grammar allows, and never end a thought.
                "structured-outputs-config": {
                    "disable_any_whitespace": True,
                    "backend": "xgrammar",
                    "enable_in_reasoning": True,
                },
            },
            "env": {"VLLM_ENABLE_RESPONSES_API_STORE": "1"},
        },
        router={"tenants": {"a": {"api_keys": ["key-a"]}, "b": {"api_keys": ["key-b"]}}},
    )
    cluster.http.headers["authorization"] = "Bearer key-a"
    cluster.ready_replicas(2)
    return cluster


@pytest.fixture(scope="module")
def client(cluster: Deployed) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="key-a", max_retries=0)


@pytest.fixture(scope="module")
def claude(cluster: Deployed) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=cluster.endpoint, api_key="key-a", max_retries=0)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    defaults: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 200, "temperature": 0}
    return client.chat.completions.create(**defaults | options)


def metric(cluster: Deployed, name: str) -> float:
    """Sum over the replicas' own metrics."""
    pages = [cluster.ask_replica(replica, "GET", "/metrics").text for replica in cluster.replicas()]
    return sum(float(value) for page in pages for value in re.findall(rf"^{name} (\S+)$", page, re.M))


# Chat.


def test_a_model_calls_a_tool_that_it_must_call(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "find"}}):
        answer = chat(client, tools=[STRICT_TOOL], tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "find"
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_read_from_an_answer(client: openai.OpenAI, stream: bool) -> None:
    body = {"structured_outputs": {"choice": [CALL_TEXT]}}
    answer = chat(client, tools=[TOOL], tool_choice="auto", extra_body=body, stream=stream)
    if stream:
        pieces = [piece.choices[0] for piece in answer]
        calls = [call.function for piece in pieces for call in piece.delta.tool_calls or ()]
        name, arguments = calls[0].name, "".join(call.arguments or "" for call in calls)
        reason = pieces[-1].finish_reason
    else:
        call = answer.choices[0].message.tool_calls[0].function
        name, arguments, reason = call.name, call.arguments, answer.choices[0].finish_reason
    assert (name, json.loads(arguments), reason) == ("find", {"city": "Oslo"}, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_is_told_apart_from_the_answer(client: openai.OpenAI, stream: bool) -> None:
    body = {
        "chat_template_kwargs": {"thinking": True},
        "structured_outputs": {"regex": THOUGHT},
        "logit_bias": {str(VOCAB - 1): 50},  # </think>, where the grammar allows it
    }
    answer = chat(client, extra_body=body, stream=stream)
    if stream:
        deltas = [piece.choices[0].delta for piece in answer if piece.choices]
        thought = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        said = "".join(delta.content or "" for delta in deltas)
    else:
        message = answer.choices[0].message
        thought, said = message.reasoning, message.content
    assert re.fullmatch("[a-z ]{4,8}", thought)
    assert said in ("yes", "no")


def test_an_answer_keeps_to_json(client: openai.OpenAI) -> None:
    answer = chat(client, response_format=JSON_SCHEMA)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Oslo")
    free = chat(client, response_format={"type": "json_object"}, max_tokens=20)
    assert free.choices[0].message.content.startswith("{")


def test_choices_repeat_with_their_seed_and_end_at_a_stop_word(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = chat(client, n=3, seed=5, temperature=1.0, max_tokens=8)
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) > 1
    assert texts() == first
    whole = chat(client, max_tokens=24).choices[0].message.content
    stop = next(char for char in whole[4:] if char.isascii() and char not in whole[:4])
    cut = chat(client, max_tokens=24, stop=[stop]).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_log_probabilities_come_with_every_token_of_a_stream(client: openai.OpenAI) -> None:
    pieces = list(
        chat(
            client,
            stream=True,
            max_tokens=6,
            logprobs=True,
            top_logprobs=2,
            stream_options={"include_usage": True},
        )
    )
    tokens = [
        token
        for piece in pieces
        for choice in piece.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert len(tokens) == pieces[-1].usage.completion_tokens == 6
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)
    assert pieces[-1].choices == []


def test_a_batch_of_chats_has_an_answer_each(cluster: Deployed, client: openai.OpenAI) -> None:
    batch = {"model": "tiny", "messages": [[USER], [USER, USER]], "max_tokens": 6, "temperature": 0}
    answer = cluster.http.post(CHAT + "/batch", json=batch).json()
    alone = [chat(client, messages=messages, max_tokens=6) for messages in batch["messages"]]
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [one.choices[0].message.content for one in alone]


# Completions.


def test_every_form_of_a_prompt_completes(client: openai.OpenAI) -> None:
    def texts(prompt: Any, **options: Any) -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=6, temperature=0, **options
        )
        return [choice.text for choice in answer.choices]

    one, two = texts("one"), texts([5, 6, 7])
    assert texts(["one", "one"]) == one * 2
    assert texts([[5, 6, 7], [8]])[:1] == two
    assert texts("one", echo=True) == ["one" + one[0]]
    with pytest.raises(openai.BadRequestError, match="suffix"):
        texts("one", suffix="two")


def test_a_streamed_completion_is_the_whole_one(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": "go on",
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 2,
    }
    whole = client.completions.create(**body)
    pieces = list(client.completions.create(**body, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert sum(len(piece.choices[0].logprobs.tokens) for piece in pieces if piece.choices[0].logprobs) == 12
    assert len(logprobs.tokens or ()) == 12


# Responses.


def respond(client: openai.OpenAI, text: str, **options: Any) -> tuple[Any, str]:
    """A response, and the replica that made it."""
    raw = client.responses.with_raw_response.create(
        model="tiny", input=text, **{"max_output_tokens": 8, "temperature": 0} | options
    )
    return raw.parse(), raw.headers["x-manta-replica"]


def test_a_streamed_response_is_the_whole_one(client: openai.OpenAI) -> None:
    whole, _ = respond(client, "go on", instructions="Answer.")
    events = list(
        client.responses.create(
            model="tiny",
            input="go on",
            instructions="Answer.",
            max_output_tokens=8,
            temperature=0,
            stream=True,
        )
    )
    assert whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
        whole.output_text
    )
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_a_response_goes_on_where_it_is_stored(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(8) as pool:
        firsts = list(
            pool.map(lambda n: respond(client, f"{n}: " + "word " * 100, max_output_tokens=100), range(8))
        )
    assert len({replica for _, replica in firsts}) == 2
    for first, replica in firsts:
        for _ in range(2):
            again, where = respond(client, "and then?", previous_response_id=first.id)
            assert where == replica
            assert again.usage.input_tokens > first.usage.input_tokens
            first = again
        assert client.responses.retrieve(first.id).output_text == first.output_text
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            client.responses.cancel(first.id)


def test_a_streamed_response_is_stored_too(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="tiny", input="hi", max_output_tokens=8, stream=True))
    response = events[0].response
    assert client.responses.retrieve(response.id).status in ("completed", "incomplete")


def test_a_response_in_the_background_is_waited_for_and_cancelled(
    cluster: Deployed, client: openai.OpenAI
) -> None:
    short, _ = respond(client, "hi", background=True)
    assert short.status in ("queued", "in_progress")
    done = ("completed", "incomplete")
    wait_for("the response", lambda: client.responses.retrieve(short.id).status in done)
    cluster.wait_idle()
    long, _ = respond(client, "hi", background=True, max_output_tokens=CONTEXT - 100)
    wait_for("it to count as open", lambda: sum(r["open_requests"] for r in cluster.replicas()) == 1)
    assert client.responses.cancel(long.id).status == "cancelled"
    cluster.wait_idle()


def test_a_response_of_another_tenant_does_not_exist(cluster: Deployed, client: openai.OpenAI) -> None:
    other = openai.OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="key-b", max_retries=0)
    theirs, _ = respond(client, "hi")
    for asked in (theirs.id, "resp_0"):
        for ask in (
            lambda id: other.responses.retrieve(id),
            lambda id: other.responses.cancel(id),
            lambda id: respond(other, "hi", previous_response_id=id),
        ):
            with pytest.raises(openai.NotFoundError, match=f"'{asked}' not found"):
                ask(asked)


# Messages.


def test_a_streamed_message_is_the_whole_one(claude: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 12,
        "temperature": 0,
        "system": "Answer.",
        "messages": [USER],
    }
    body["extra_body"] = {"temperature": body.pop("temperature")}
    whole = claude.messages.create(**body)
    with claude.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        last = stream.get_final_message()
    assert whole.usage.output_tokens == last.usage.output_tokens == 12
    assert whole.stop_reason == last.stop_reason == "max_tokens"
    counted = claude.messages.count_tokens(
        model="tiny", system="Answer.", messages=body["messages"]
    ).input_tokens
    # vLLM counts a message's cached tokens apart from its input.
    usage = last.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) + (
        usage.cache_creation_input_tokens or 0
    )


def test_a_message_calls_a_tool(claude: anthropic.Anthropic) -> None:
    function: Any = STRICT_TOOL["function"]
    tool = {"name": "find", "input_schema": function["parameters"], "strict": True}
    answer = claude.messages.create(
        model="tiny",
        max_tokens=200,
        messages=[USER],
        tools=[tool],
        tool_choice={"type": "tool", "name": "find"},
        extra_body={"temperature": 0},
    )
    (call,) = answer.content
    assert call.type == "tool_use"
    assert call.input["city"] in ("Paris", "Oslo")


def test_errors_of_messages_have_anthropics_shape(cluster: Deployed, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="other", max_tokens=1, messages=[USER])
    assert caught.value.body["type"] == "error"
    stranger = anthropic.Anthropic(base_url=cluster.endpoint, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught_too:
        stranger.messages.create(model="tiny", max_tokens=1, messages=[USER])
    assert caught_too.value.body["error"]["type"] == "AuthenticationError"


# The rest.


def test_models_and_tokens(cluster: Deployed, client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.max_model_len) == ("tiny", CONTEXT)
    text = "Tokens: é 日本"
    tokens = cluster.http.post("/tokenize", json={"model": "tiny", "prompt": text}).json()["tokens"]
    back = cluster.http.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()
    assert back["prompt"] == text
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="hi")


# Tokenising once.


@pytest.mark.parametrize("stream", [False, True])
def test_no_replica_tokenises_what_the_router_has(
    cluster: Deployed, client: openai.OpenAI, stream: bool
) -> None:
    def calls() -> int:
        counts = [cluster.ask_replica(replica, "GET", COUNT_PATH).json() for replica in cluster.replicas()]
        return sum(sum(count.values()) for count in counts)

    before = calls()
    for number in range(4):
        answer = chat(client, messages=[USER, {"role": "user", "content": str(number)}], stream=stream)
        assert list(answer)
        done = client.completions.create(
            model="tiny", prompt=["one", f"two {number}"], max_tokens=8, stream=stream
        )
        assert list(done)
    assert calls() == before
    body = {"model": "tiny", "prompt": "one", "max_tokens": 1}
    cluster.ask_replica(cluster.replicas()[0], "POST", COMPLETIONS, json=body)
    assert calls() > before, "nothing is counted"


# Sameness.


def both(cluster: Deployed, path: str, content: bytes) -> tuple[Answer, Answer]:
    """Through the router, and from the replica that it chose. The replica's own answer finds no KV."""
    headers = {"content-type": "application/json"}
    ours = cluster.http.post(path, content=content, headers=headers)
    known = {replica["id"]: replica for replica in cluster.replicas()}
    replica = known.get(ours.headers.get("x-manta-replica"), next(iter(known.values())))
    headers[SALT_HEADER] = uuid.uuid4().hex
    theirs = cluster.ask_replica(replica, "POST", path, content=content, headers=headers)
    return _answer(ours), _answer(theirs)


def _answer(answer: httpx.Response) -> Answer:
    return Answer(answer.status_code, answer.headers.get("content-type", ""), answer.content)


def test_answers_equal_vllms_own(cluster: Deployed) -> None:
    substituted = metric(cluster, "manta_substituted_prompts_total")
    asked = list(shapes(SHAPES, seed=1, model="tiny"))

    def ask(shape: Shape) -> tuple[Answer, Answer]:
        # With a salt of its own, the request finds no KV through the router either.
        body = shape.body | {"cache_salt": uuid.uuid4().hex}
        return both(cluster, shape.path, json.dumps(body).encode())

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(ask, asked))
    different = [
        f"{shape}\n{found}"
        for shape, (ours, theirs) in zip(asked, answers, strict=True)
        if (found := difference(ours, theirs))
    ]
    assert not different, f"{len(different)} of {SHAPES}:\n\n" + "\n\n".join(different)
    good = [shape for shape, (ours, _) in zip(asked, answers, strict=True) if ours.status == 200]
    assert len(good) > SHAPES * 0.75
    texts = sum(_texts(shape.body) for shape in good if shape.path in (CHAT, COMPLETIONS))
    assert texts > SHAPES / 3
    assert metric(cluster, "manta_substituted_prompts_total") - substituted >= texts
    assert metric(cluster, "manta_mismatched_requests_total") == 0


def _texts(body: dict[str, Any]) -> int:
    """Prompts of a body that have to be tokenised."""
    prompt = body.get("prompt", "")
    return 1 if isinstance(prompt, str) else sum(isinstance(item, str) for item in prompt)


@pytest.mark.parametrize("refused", bad_requests.SAME.values(), ids=bad_requests.SAME.keys())
def test_a_bad_request_is_refused_in_vllms_words(cluster: Deployed, refused: Refused) -> None:
    ours, theirs = both(cluster, refused.path, content_of(refused))
    assert difference(ours, theirs) == ""
    assert 400 <= ours.status < 500 or ours.status == 501, ours


@pytest.mark.parametrize("own", bad_requests.OWN.values(), ids=bad_requests.OWN.keys())
def test_where_the_router_has_words_of_its_own_the_status_is_vllms(cluster: Deployed, own: Own) -> None:
    ours, theirs = both(cluster, own.refused.path, content_of(own.refused))
    assert ours.status == theirs.status
    assert difference(ours, theirs), "no longer a difference"
    assert own.says in ours.body.decode(), own.why


def content_of(refused: Refused) -> bytes:
    body = refused.body
    return body if isinstance(body, bytes) else json.dumps({"model": "tiny"} | body).encode()
