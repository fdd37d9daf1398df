"""Whether an engine's KV can be shared in whole chunks at all."""

from __future__ import annotations

from typing import Any

from workers.vllm.identity import measures_scales

_WHOLE_PREFIX = ("FullAttentionSpec", "MLAAttentionSpec")
"""KV cache specs of vLLM in which a block holds the KV of its own tokens, for as long as the request lives."""


class NotShareableError(ValueError):
    """This model, run like this, can't share its KV. The message says why and what to do."""


def check_shareable(config: Any, kv_cache: Any, chunk_tokens: int) -> None:
    """`config` is a VllmConfig, `kv_cache` a KVCacheConfig. Raises NotShareableError."""
    reason = _reason(config, kv_cache, chunk_tokens)
    if reason:
        raise NotShareableError(
            f"KV of {config.model_config.model} can't be shared: {reason}. Set cache.share to `auto`, to serve it "
            "without sharing, or to `off`"
        )


def _reason(config: Any, kv_cache: Any, chunk_tokens: int) -> str:
    groups = kv_cache.kv_cache_groups
    kinds = sorted({kind for group in groups for kind in _kinds(group.kv_cache_spec)})
    if len(groups) != 1:
        return (
            f"its KV cache has {len(groups)} groups ({', '.join(kinds) or 'none'}); one group can be shared"
        )
    group = groups[0]
    if any(kind not in _WHOLE_PREFIX for kind in kinds):
        return f"its KV cache is of {', '.join(kinds)}; {' and '.join(_WHOLE_PREFIX)} can be shared"
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        return "its KV cache is not open to connectors"
    block = group.kv_cache_spec.block_size
    if block != config.cache_config.block_size:
        return (
            f"its KV cache has blocks of {block} tokens and the engine says {config.cache_config.block_size}"
        )
    if chunk_tokens % block:
        return f"a chunk of {chunk_tokens} tokens is no whole number of blocks of {block}"
    if measures_scales(config):
        return "the engine measures the scales of its KV itself, so that no other engine's fits"
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism deals a block's tokens out to several ranks"
    return ""


def _kinds(spec: Any) -> set[str]:
    """Names of the kinds of layers in a group."""
    layers = getattr(spec, "kv_cache_specs", None)
    return {type(layer).__name__ for layer in layers.values()} if layers else {type(spec).__name__}
