"""KV that must not be shared is not: of other engines with the same prompt in one store, behind images, of embeddings.

An engine of the tiny model computes and saves. The others share its store, where its chunks are, and compute.
"""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image

from tests.engine.served import BLOCK, CHUNK, CHUNKS, PROMPT, Answer, Served, serving
from tests.engine.tiered_store import TieredStore
from tests.tiny_model import HIDDEN
from tests.tiny_vision import IMAGE, IMAGE_TOKENS, make_tiny_vision_model

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

WHOLE = CHUNKS * CHUNK
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredStore]:
    store = TieredStore(CHUNK, tmp_path_factory.mktemp("disk"))
    yield store
    store.check()
    store.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def first(vllm_environment: None, tiny_model: Path, store: TieredStore) -> AsyncIterator[Served]:
    async with serving(tiny_model, store, **{"enable-prompt-embeds": True}) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cold(first: Served, store: TieredStore) -> Answer:
    answer = await first.complete(PROMPT)
    assert answer.cached["computed"] == len(PROMPT)
    await first.saved(PROMPT)
    return answer


async def shares_with_itself_alone(other: Served, first: Served, store: TieredStore) -> Answer:
    """What the other engine answers to the prompt; both then have their own chunks in the store."""
    theirs = store.in_memory
    computed = await other.complete(PROMPT)
    assert computed.cached["computed"] == len(PROMPT)
    await other.saved(PROMPT)
    assert theirs.isdisjoint(other.keys(PROMPT))
    for engine, expected in ((other, computed), (first, await first.complete(PROMPT))):
        await engine.forget()
        loaded = await engine.complete(PROMPT)
        assert (loaded.tokens, loaded.cached["dram"]) == (expected.tokens, WHOLE)
    return computed


async def test_an_engine_with_other_types_shares_with_itself_alone(
    first: Served, cold: Answer, store: TieredStore, tiny_model: Path
) -> None:
    async with serving(tiny_model, store, dtype="bfloat16") as other:
        await shares_with_itself_alone(other, first, store)
        await other.forget()


async def test_an_engine_with_other_blocks_shares_with_itself_alone(
    first: Served, cold: Answer, store: TieredStore, tiny_model: Path
) -> None:
    async with serving(tiny_model, store, **{"block-size": 2 * BLOCK}) as other:
        computed = await shares_with_itself_alone(other, first, store)
        assert computed.tokens == cold.tokens
        await other.forget()


async def test_keys_of_another_format_name_nothing_that_is_there(
    first: Served, cold: Answer, store: TieredStore, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cache_store.keys import FORMAT_VERSION, EngineIdentity

    def next_identity(**fields: Any) -> EngineIdentity:
        return EngineIdentity(**fields, format_version=FORMAT_VERSION + 1)

    monkeypatch.setattr("workers.vllm.identity.EngineIdentity", next_identity)
    async with serving(tiny_model, store, module="tests.engine.next_format") as other:
        assert other.engine.info.identity.format_version == FORMAT_VERSION + 1
        computed = await shares_with_itself_alone(other, first, store)
        assert computed.tokens == cold.tokens
        await other.forget()


# What is not tokens alone.


def picture(colour: str) -> dict[str, Any]:
    data = io.BytesIO()
    Image.new("RGB", (40, 30), colour).save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


async def test_two_images_of_a_size_share_what_is_before_them_alone(
    first: Served, cold: Answer, store: TieredStore, tmp_path: Path
) -> None:
    """By another model, too, to which no chunk of the first one's is anything."""

    async def shows(colour: str, salt: str = "") -> tuple[list[int], dict[str, int]]:
        before = {"type": "text", "text": "Look at it carefully, and say what it is. " * 30}
        after = {"type": "text", "text": "Say what you see, and nothing else, in a few words. " * 20}
        messages = [{"role": "user", "content": [before, picture(colour), after]}]
        body = {"messages": messages, "max_tokens": 12, "return_token_ids": True}
        content, cached = await other.post(CHAT, body, salt)
        prompt.update({colour: content["prompt_token_ids"]})
        return content["choices"][0]["token_ids"], cached

    prompt: dict[str, list[int]] = {}
    model = make_tiny_vision_model(tmp_path / "vision")
    async with serving(model, store, **{"max-model-len": 2048}) as other:
        theirs = store.in_memory
        assert (await other.complete(PROMPT)).cached["computed"] == len(PROMPT)
        await other.saved(PROMPT)
        there = store.in_memory
        assert theirs < there

        red, _ = await shows("red")
        await other.forget()
        # Two tokens say that an image begins.
        shareable = (prompt["red"].index(IMAGE) - 2) // CHUNK * CHUNK
        assert shareable > 0
        assert len(prompt["red"]) > shareable + CHUNK + IMAGE_TOKENS + CHUNK
        assert store.in_memory - there == set(other.keys(prompt["red"][:shareable]))
        blue, cached = await shows("blue")
        assert prompt["blue"] == prompt["red"]
        assert (cached["dram"], cached["computed"]) == (shareable, len(prompt["red"]) - shareable)
        await other.forget()
        assert store.in_memory - there == set(other.keys(prompt["red"][:shareable]))
        assert await shows("red", "salt") == (
            red,
            dict.fromkeys(cached, 0) | {"computed": len(prompt["red"])},
        )
        assert (await shows("blue", "salt"))[0] == blue != red
        await other.forget()


async def test_two_prompt_embeddings_of_a_size_share_nothing(
    first: Served, cold: Answer, store: TieredStore
) -> None:
    import torch

    async def embedded(seed: int) -> list[int]:
        embeddings = torch.randn((3 * CHUNK, HIDDEN), generator=torch.Generator().manual_seed(seed)) / 8
        data = io.BytesIO()
        torch.save(embeddings, data)
        given = base64.b64encode(data.getvalue()).decode()
        body = {"prompt_embeds": given, "max_tokens": 12, "return_token_ids": True}
        content, cached = await first.post(COMPLETIONS, body)
        assert not cached["dram"]
        tokens: list[int] = content["choices"][0]["token_ids"]
        return tokens

    await first.forget()
    there = store.in_memory
    one, other = await embedded(1), await embedded(2)
    assert one != other
    await first.forget()
    assert [await embedded(2), await embedded(1)] == [other, one]
    await first.forget()
    assert store.in_memory == there
