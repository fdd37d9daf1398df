"""A model that takes images: requests with one are routed, and nothing behind an image is shared by its tokens."""

from __future__ import annotations

import base64
import io
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from cache_store.events import ChunkKey, FrameReader, Snapshot, unpack_keys
from tests.cluster.deployed import Deployed, wait_for
from tests.cluster.sameness import Answer, difference
from tests.tiny_vision import IMAGE, IMAGE_TOKENS, make_tiny_vision_model
from workers.messages import SALT_HEADER, SNAPSHOT_PATH

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(300)]

BLOCK, CHUNK = 32, 64
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("vision") / "tiny")


@pytest.fixture(scope="module")
def cluster(deploy_vllm: Callable[..., Deployed], model: Path) -> Deployed:
    cluster = deploy_vllm(
        model={"path": str(model)}, pools=[{"role": "unified", "replicas": 1, "resources": {"cores": 1}}]
    )
    cluster.ready_replicas(1)
    return cluster


def picture(colour: str) -> dict[str, Any]:
    data = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def asks(name: str, *colours: str) -> dict[str, Any]:
    """Text, the images, and text again, each text of more than two chunks."""
    before = {"type": "text", "text": f"{name}: " + "Look at it carefully, and say what it is. " * 8}
    after = {"type": "text", "text": "Say what you see, and nothing else, in a few words. " * 8}
    content = [before, *map(picture, colours), after]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
    }


def ask(cluster: Deployed, body: dict[str, Any]) -> dict[str, Any]:
    answer = cluster.http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def held(cluster: Deployed) -> set[ChunkKey]:
    """Chunks that the replica says that it holds."""
    (replica,) = cluster.replicas()
    frames = FrameReader().feed(cluster.ask_replica(replica, "GET", SNAPSHOT_PATH).content)
    return {key for tier in frames if isinstance(tier, Snapshot) for key in unpack_keys(tier.keys)}


def before_the_image(answer: dict[str, Any]) -> int:
    """Tokens before the first image, which begins with two tokens that say so."""
    return int(answer["prompt_token_ids"].index(IMAGE)) - 2


def test_kv_is_shared_up_to_an_image_and_not_past_it(cluster: Deployed) -> None:
    before = held(cluster)
    red = ask(cluster, asks("one", "red"))
    shareable = before_the_image(red)
    assert red["usage"]["prompt_tokens"] > shareable + IMAGE_TOKENS + 2 * CHUNK
    assert shareable > 2 * CHUNK
    fence = {"model": "tiny", "prompt": [5] * CHUNK, "max_tokens": 1}
    assert cluster.http.post("/v1/completions", json=fence).status_code == 200
    # The chunks before the image, and the fence: once it is there, so is all that was stored before it.
    expected = shareable // CHUNK + 1
    wait_for("the chunks before the image", lambda: len(held(cluster) - before) >= expected)
    assert len(held(cluster) - before) == expected

    blue = ask(cluster, asks("one", "blue"))
    assert blue["prompt_token_ids"] == red["prompt_token_ids"]
    assert cached(blue) == shareable // BLOCK * BLOCK
    assert len(held(cluster) - before) == expected
    wait_for("the router's index", lambda: cluster.replicas()[0]["chunks"] == len(held(cluster)))
    again = ask(cluster, asks("one", "red"))
    assert cached(again) > shareable + IMAGE_TOKENS
    assert again["choices"] == red["choices"]


def test_answers_are_vllms_own(cluster: Deployed) -> None:
    (replica,) = cluster.replicas()
    texts = set()
    for colours in (("red",), ("blue",), ("red", "green"), ()):
        for stream in (False, True):
            body = asks("two", *colours) | {"stream": stream, "cache_salt": uuid.uuid4().hex}
            content = json.dumps(body).encode()
            ours = cluster.http.post(CHAT, content=content, headers={"content-type": "application/json"})
            headers = {"content-type": "application/json", SALT_HEADER: uuid.uuid4().hex}
            theirs = cluster.ask_replica(replica, "POST", CHAT, content=content, headers=headers)
            assert ours.status_code == 200, ours.text
            assert difference(_answer(ours), _answer(theirs)) == ""
            if not stream:
                texts.add(ours.json()["choices"][0]["message"]["content"])
    assert len(texts) == 4, "the model does not see its images"


def test_text_alone_is_still_tokenised_once(cluster: Deployed) -> None:
    (replica,) = cluster.replicas()

    def substituted() -> str:
        page = cluster.ask_replica(replica, "GET", "/metrics").text
        return next(line for line in page.splitlines() if line.startswith("manta_substituted_prompts_total "))

    before = substituted()
    ask(cluster, asks("three", "red"))
    assert substituted() == before
    ask(cluster, asks("three"))
    assert substituted() != before


def test_what_is_no_image_is_refused(cluster: Deployed) -> None:
    client = openai.OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="any", max_retries=0)
    broken: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": [broken]}])


def _answer(answer: httpx.Response) -> Answer:
    return Answer(answer.status_code, answer.headers.get("content-type", ""), answer.content)
