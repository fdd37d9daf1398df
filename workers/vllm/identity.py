"""What the KV of a vLLM engine depends on, read from its configuration in any of its processes."""

from __future__ import annotations

import uuid
from typing import Any

from cache_store.keys import EngineIdentity
from workers.fingerprint import model_id
from workers.transfer import KVLayout, Transfer


def engine_identity(config: Any, model: str, chunk_tokens: int, layout: str | None = None) -> EngineIdentity:
    """`config` is a VllmConfig, `model` names its weights (`weights_of`).

    `layout`: of the KV cache, which only the engine's own processes know; None for what `config` says of it.
    Raises ValueError for a chunk that no whole number of the engine's blocks makes.
    """
    from vllm.platforms import current_platform

    model_config, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    dtype = str(model_config.dtype).removeprefix("torch.")
    overrides = model_config.hf_overrides
    if not isinstance(overrides, dict):
        overrides = {"function": f"{overrides.__module__}.{overrides.__qualname__}"}
    return EngineIdentity(
        model=model,
        quantization=str(model_config.quantization or ""),
        hf_overrides=overrides,
        # Scales that an engine measures on its own first requests are like no other engine's.
        kv_scales=uuid.uuid4().hex if measures_scales(config) else "",
        rope_scaling=getattr(model_config.hf_text_config, "rope_parameters", None)
        or getattr(model_config.hf_text_config, "rope_scaling", None)
        or {},
        kv_dtype=dtype if cache.cache_dtype == "auto" else cache.cache_dtype,
        layers=model_config.get_num_layers(parallel) * parallel.pipeline_parallel_size,
        kv_heads=model_config.get_total_num_kv_heads(),
        head_size=model_config.get_head_size(),
        block_tokens=cache.block_size,
        layout=(layout or kv_layout(config)) + _draft(config),
        platform=current_platform.device_type,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        chunk_tokens=chunk_tokens,
    )


def weights_of(path: str, revision: str | None) -> str:
    """Name of a model's weights by content. Slow the first time: tens of gigabytes may be read."""
    return model_id(path, revision=revision)


def transfer_of(config: Any, identity: EngineIdentity) -> Transfer:
    """What an engine of this VllmConfig says of itself to those that would fetch its KV by NIXL."""
    import vllm

    layout = KVLayout.of(identity, f"vllm {vllm.__version__}", bool(config.model_config.use_mla))
    return Transfer("nixl", config.kv_transfer_config.engine_id, layout)


def kv_layout(config: Any) -> str:
    """vLLM's name for how blocks lie in memory; `default` where this process was not told."""
    return str(getattr(config.cache_config, "kv_cache_layout", None) or "default")


def measures_scales(config: Any) -> bool:
    """The engine measures the scales of a quantised KV itself."""
    return bool(getattr(config.cache_config, "calculate_kv_scales", False))


def _draft(config: Any) -> str:
    """A draft model's KV lies in the same blocks."""
    speculative = config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if speculative is None or draft is None or speculative.method in ("ngram", "ngram_gpu", "suffix"):
        return ""
    return f"+{speculative.method}:{draft.model}@{draft.revision or ''}"
