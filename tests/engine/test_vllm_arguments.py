"""Engine arguments of a configuration, as vLLM's own parser reads them."""

from __future__ import annotations

from typing import Any

import pytest

from workers.vllm.arguments import EngineArgumentError, parse_engine_args

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _environment(vllm_environment: None) -> None: ...


@pytest.mark.parametrize(
    ("name", "value", "attribute", "expected"),
    [
        ("max-model-len", 4096, "max_model_len", 4096),
        ("max_model_len", "4k", "max_model_len", 4000),
        ("max-model-len", -1, "max_model_len", -1),
        ("enforce-eager", True, "enforce_eager", True),
        ("enforce-eager", False, "enforce_eager", False),
        ("enable-prefix-caching", False, "enable_prefix_caching", False),
        ("enable-prefix-caching", None, "enable_prefix_caching", None),
        ("hf-overrides", {"a": 1}, "hf_overrides", {"a": 1}),
        ("cudagraph-capture-sizes", [1, 2], "cudagraph_capture_sizes", [1, 2]),
        ("middleware", ["a.b", "c.d"], "middleware", ["a.b", "c.d"]),
        ("allowed-origins", ["https://a"], "allowed_origins", ["https://a"]),
        ("gpu-memory-utilization", 0.5, "gpu_memory_utilization", 0.5),
    ],
)
def test_a_value_of_yaml_becomes_vllms(name: str, value: Any, attribute: str, expected: Any) -> None:
    args = parse_engine_args("/models/m", "m", {name: value})
    assert getattr(args, attribute) == expected
    assert (args.model, args.served_model_name) == ("/models/m", ["m"])


def test_a_dot_reaches_into_an_argument_that_is_json() -> None:
    args = parse_engine_args(
        "/models/m", "m", {"kv-transfer-config.kv_connector": "X", "kv-transfer-config.kv_role": "kv_both"}
    )
    assert (args.kv_transfer_config.kv_connector, args.kv_transfer_config.kv_role) == ("X", "kv_both")


def test_extra_words_win() -> None:
    assert parse_engine_args("/m", "m", {"seed": 1}, ["--seed", "2"]).seed == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"max-modellen": 1}, "engine.args.max-modellen: vLLM has no argument --max-modellen"),
        ({"max-model": 1}, "vLLM has no argument --max-model"),
        ({"max-model-len": "long"}, "argument --max-model-len: invalid .* 'long'"),
        ({"dtype": "float33"}, "argument --dtype: invalid choice: 'float33'"),
        ({"enforce-eager": "yes"}, "--enforce-eager.*'yes'"),
        ({"model": "other"}, "model.path gives it"),
        ({"served_model_name": "other"}, "model.name gives it"),
        ({"enable-auto-tool-choice": True}, "requires --tool-call-parser"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(args: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineArgumentError, match=words):
        parse_engine_args("/m", "m", args)
