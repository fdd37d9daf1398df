"""A model that embeds: what its server offers works through the router, and what it does not is refused."""

from __future__ import annotations

from collections.abc import Callable

import openai
import pytest

from tests.cluster.deployed import Deployed

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(deploy_vllm: Callable[..., Deployed]) -> Deployed:
    cluster = deploy_vllm(
        engine={"args": {"runner": "pooling", "convert": "embed"}},
        router={"tenants": {"a": {"api_keys": ["key-a"]}}},
        pools=[{"role": "unified", "replicas": 1, "resources": {"cores": 1}}],
    )
    cluster.http.headers["authorization"] = "Bearer key-a"
    cluster.ready_replicas(1)
    return cluster


@pytest.fixture(scope="module")
def client(cluster: Deployed) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="key-a", max_retries=0)


def test_every_form_of_an_input_is_embedded_as_vllm_does(cluster: Deployed, client: openai.OpenAI) -> None:
    (replica,) = cluster.replicas()
    for asked in ("one text", ["one text", "and another"], [5, 6, 7], [[5, 6], [7]]):
        for form in ("float", "base64"):
            body = {"model": "tiny", "input": asked, "encoding_format": form}
            direct = cluster.ask_replica(replica, "POST", "/v1/embeddings", json=body).json()
            ours = cluster.http.post("/v1/embeddings", json=body).json()
            assert ours["data"] == direct["data"]
            assert ours["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]
    one, two = client.embeddings.create(model="tiny", input=["a city", "a block"]).data
    assert len(one.embedding) == len(two.embedding) == 64
    assert one.embedding != two.embedding


def test_near_texts_score_higher(cluster: Deployed) -> None:
    body = {"model": "tiny", "text_1": "a city", "text_2": ["a city", "seven blocks of tokens"]}
    same, other = (item["score"] for item in cluster.http.post("/v1/score", json=body).json()["data"])
    assert same > other
    assert same == pytest.approx(1, abs=1e-3)


def test_what_a_model_that_embeds_does_not_do_is_refused(cluster: Deployed, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as chat:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.APIStatusError) as completion:
        client.completions.create(model="tiny", prompt="hi")
    (replica,) = cluster.replicas()
    body = {"model": "tiny", "prompt": "hi"}
    direct = cluster.ask_replica(replica, "POST", "/v1/completions", json=body)
    assert chat.value.status_code == completion.value.status_code == direct.status_code
    with pytest.raises(openai.NotFoundError, match="other"):
        client.embeddings.create(model="other", input="hi")


def test_it_tokenises(cluster: Deployed) -> None:
    tokens = cluster.http.post("/tokenize", json={"model": "tiny", "prompt": "hi there"}).json()["tokens"]
    back = cluster.http.post("/detokenize", json={"model": "tiny", "tokens": tokens}).json()["prompt"]
    assert back == "hi there"
