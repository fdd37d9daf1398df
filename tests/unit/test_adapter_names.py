"""LoRA adapters: a public name for clients, a name with the content's hash for vLLM and for keys."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cache_store.keys import namespace
from tests.tiny_adapter import make_tiny_adapter
from workers.config import ModelConfig
from workers.vllm.adapters import engine_names, publish_names


class StubModels:
    """What of vLLM's `OpenAIServingModels` the names are put into."""

    def __init__(self, *adapters: str) -> None:
        self.lora_requests = {
            name: SimpleNamespace(lora_name=name, lora_path=f"/{name}") for name in adapters
        }

    def model_name(self, lora_request: Any = None) -> str:
        return lora_request.lora_name if lora_request is not None else "base"

    async def show_available_models(self) -> Any:
        cards = [SimpleNamespace(id="base"), *(SimpleNamespace(id=name) for name in self.lora_requests)]
        return SimpleNamespace(data=cards)


@pytest.fixture(autouse=True)
def _own_fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_clients_ask_by_the_public_name_and_the_engine_is_given_its_own() -> None:
    models = StubModels("kind@1", "terse@2")
    publish_names(models, {"kind": "kind@1", "terse": "terse@2"})
    assert set(models.lora_requests) == {"kind", "terse"}
    assert models.lora_requests["kind"].lora_name == "kind@1"


def test_answers_show_the_public_name() -> None:
    models = StubModels("kind@1")
    publish_names(models, {"kind": "kind@1"})
    assert models.model_name(models.lora_requests["kind"]) == "kind"
    assert models.model_name() == "base"


async def test_the_list_of_models_shows_public_names() -> None:
    models = StubModels("kind@1", "terse@2")
    publish_names(models, {"kind": "kind@1", "terse": "terse@2"})
    assert [card.id for card in (await models.show_available_models()).data] == ["base", "kind", "terse"]


def test_an_adapter_that_the_configuration_does_not_name_keeps_its_name() -> None:
    models = StubModels("other")
    publish_names(models, {"kind": "kind@1"})
    assert set(models.lora_requests) == {"other"}
    assert models.model_name(models.lora_requests["other"]) == "other"


def named(folder: Path) -> str:
    return engine_names(ModelConfig(path="m", adapters={"kind": str(folder)}))["kind"]


def test_the_engines_name_is_the_public_one_with_the_contents_hash(tmp_path: Path) -> None:
    one = named(make_tiny_adapter(tmp_path / "one", seed=1))
    copy = named(make_tiny_adapter(tmp_path / "copy", seed=1))
    assert one.startswith("kind@")
    assert len(one) == len("kind@") + 32
    assert copy == one


def test_other_weights_under_the_same_name_share_no_keys(tmp_path: Path) -> None:
    before = named(make_tiny_adapter(tmp_path / "kind", seed=1))
    after = named(make_tiny_adapter(tmp_path / "kind", seed=2))
    assert before != after
    engine = b"e" * 32
    assert len({namespace(engine, name, "salt") for name in (before, after, "")}) == 3
