"""A random LoRA adapter for the tiny model, in PEFT's layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.tiny_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS

RANK = 8


def make_tiny_adapter(folder: Path, seed: int) -> Path:
    """Rank 8 on the query and value projections, strong enough to change what is said. Same seed, same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    random = np.random.default_rng(seed)
    weights = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{where}.lora_A.weight"] = random.standard_normal((RANK, HIDDEN)).astype(np.float32) / 8
            weights[f"{where}.lora_B.weight"] = random.standard_normal((rows, RANK)).astype(np.float32) / 3
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
