"""A random vision-language model, LLaVA in small: a CLIP of one layer and a Llama of two, with an image processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.tiny_model import (
    BOS,
    EOS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    PAD,
    VOCAB,
    make_tiny_model,
)

IMAGE_TOKEN = "<image>"
SIDE, PATCH = 56, 7
IMAGE_TOKENS = (SIDE // PATCH) ** 2
"""Tokens of one image, whatever its size."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_llava(folder: Path, seed: int = 0) -> Path:
    """Write a Hugging Face folder (config, float32 weights, tokenizer, processors) and return it."""
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    make_tiny_model(folder, seed, added=(IMAGE_TOKEN,), chat_template=CHAT_TEMPLATE)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(seed)
    config = LlavaConfig(
        text_config=_text(),
        vision_config=_vision(),
        image_token_index=VOCAB - 1,
        vision_feature_layer=-1,
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = LlavaForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    _write(folder / "processor_config.json", _processor())
    _write(folder / "preprocessor_config.json", _processor()["image_processor"])
    return folder


def _text() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def _vision() -> dict[str, Any]:
    return {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
        "projection_dim": 32,
    }


def _processor() -> dict[str, Any]:
    image = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},
        "do_convert_rgb": True,
    }
    return {
        "processor_class": "LlavaProcessor",
        "image_processor": image,
        "image_token": IMAGE_TOKEN,
        "patch_size": PATCH,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
