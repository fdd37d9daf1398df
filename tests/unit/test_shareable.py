"""Which engines' KV can be shared in whole chunks, and what the others are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from workers.vllm.connector.shareable import NotShareableError, check_shareable


class FullAttentionSpec(SimpleNamespace):
    block_size = 16


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MambaSpec(FullAttentionSpec):
    pass


class UniformTypeKVCacheSpecs(FullAttentionSpec):
    pass


def group(spec: Any, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=spec, **changes)


def config(**changes: Any) -> SimpleNamespace:
    parallel = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    cache = {"block_size": 16, "calculate_kv_scales": False}
    return SimpleNamespace(
        model_config=SimpleNamespace(model="m"),
        cache_config=SimpleNamespace(**{name: changes.get(name, value) for name, value in cache.items()}),
        parallel_config=SimpleNamespace(
            **{name: changes.get(name, value) for name, value in parallel.items()}
        ),
    )


def check(*groups: Any, chunk_tokens: int = 64, **changes: Any) -> None:
    check_shareable(config(**changes), SimpleNamespace(kv_cache_groups=list(groups)), chunk_tokens)


@pytest.mark.parametrize(
    "spec",
    [
        FullAttentionSpec(),
        MLAAttentionSpec(),
        UniformTypeKVCacheSpecs(kv_cache_specs={"a": FullAttentionSpec(), "b": MLAAttentionSpec()}),
    ],
)
def test_full_attention_is_shared(spec: Any) -> None:
    check(group(spec))
    check(group(spec, host_resident=False, enable_kv_transfer=True))


@pytest.mark.parametrize(
    ("groups", "changes", "reason"),
    [
        ([group(FullAttentionSpec()), group(SlidingWindowSpec())], {}, "2 groups .*SlidingWindowSpec"),
        ([], {}, "0 groups"),
        ([group(SlidingWindowSpec())], {}, "of SlidingWindowSpec"),
        ([group(MambaSpec())], {}, "of MambaSpec"),
        (
            [group(UniformTypeKVCacheSpecs(kv_cache_specs={"a": FullAttentionSpec(), "b": MambaSpec()}))],
            {},
            "MambaSpec",
        ),
        ([group(FullAttentionSpec(), enable_kv_transfer=False)], {}, "not open to connectors"),
        ([group(FullAttentionSpec())], {"block_size": 32}, "blocks of 16 tokens"),
        ([group(FullAttentionSpec())], {"chunk_tokens": 40}, "chunk of 40 tokens"),
        ([group(FullAttentionSpec())], {"calculate_kv_scales": True}, "measures the scales"),
        ([group(FullAttentionSpec())], {"decode_context_parallel_size": 2}, "context parallelism"),
    ],
)
def test_what_can_t_be_shared_says_why_and_what_to_do(
    groups: list[Any], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(NotShareableError, match=f"(?s)KV of m can't be shared: .*{reason}.*cache.share"):
        check(*groups, **changes)
