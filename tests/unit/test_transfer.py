"""Which engines' KV fits which: what differs, and which tensor parallel sizes go together."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from workers.messages import ReplicaInfo
from workers.transfer import KVLayout, Transfer, why_not


def engine(kind: str = "nixl", **changes: Any) -> Transfer:
    fields: dict[str, Any] = {
        "model": "m@1", "engine": "vllm 1", "kv_dtype": "bfloat16", "layers": 32, "kv_heads": 8, "head_size": 128,
        "block_tokens": 16, "layout": "LBHNC", "platform": "cuda",
    }  # fmt: skip
    return Transfer(kind, "id", KVLayout(**fields | changes))  # type: ignore[arg-type]


def test_equal_engines_fit_whoever_they_are() -> None:
    assert why_not(engine(), engine()) == ""


@pytest.mark.parametrize(
    "change", [{"model": "m@2"}, {"engine": "vllm 2"}, {"kv_dtype": "fp8"}, {"layers": 30}, {"kv_heads": 4},
               {"head_size": 64}, {"layout": "LBNHC"}, {"platform": "cpu"}, {"block_tokens": 32}, {"latent": True}],
)  # fmt: skip
def test_what_differs_is_named_with_both_layouts(change: dict[str, Any]) -> None:
    (name, value) = next(iter(change.items()))
    source = engine()
    reason = why_not(source, engine(**change))
    assert reason.startswith(f"{name} must be equal")
    assert f"computes has [{source.layout}]" in reason
    assert f"{name}={value}" in reason.split("answers")[1]


def test_kv_that_leaves_another_way_does_not_fit() -> None:
    assert "leaves by nixl and would arrive by sim" in why_not(engine(), engine("sim"))


@pytest.mark.parametrize(("source", "target"), [(1, 2), (2, 1), (1, 8), (4, 2), (8, 4), (8, 16)])
def test_tensor_parallel_sizes_may_differ_by_a_whole_factor(source: int, target: int) -> None:
    assert why_not(engine(tensor_parallel=source), engine(tensor_parallel=target)) == ""


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ({"tensor_parallel": 3}, {"tensor_parallel": 2}, "must be a multiple"),
        ({"tensor_parallel": 16}, {"tensor_parallel": 8}, "above kv_heads"),
        ({"pipeline_parallel": 2}, {}, "pipeline_parallel must be 1"),
        ({}, {"pipeline_parallel": 2}, "pipeline_parallel must be 1"),
    ],
)
def test_sizes_that_the_engine_would_die_of_are_refused(
    source: dict[str, int], target: dict[str, int], reason: str
) -> None:
    found = why_not(engine(**source), engine(**target))
    assert reason in found
    assert found.count("tensor_parallel=") == 2


def test_kv_that_is_not_split_by_heads_goes_from_more_ranks_to_fewer() -> None:
    latent = {"kv_heads": 1, "latent": True}
    assert why_not(engine(tensor_parallel=8, **latent), engine(tensor_parallel=4, **latent)) == ""


def test_a_replica_tells_what_it_can_do_in_its_metadata() -> None:
    info = ReplicaInfo("r", "prefill", "n", "h:1", ("m",), transfer=engine())
    assert msgspec.convert(msgspec.to_builtins(info), ReplicaInfo) == info
