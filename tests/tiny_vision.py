"""A random vision-language model, Idefics3 in small, whose image processor needs no torchvision."""

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

ADDED = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
IMAGE = VOCAB - len(ADDED)
"""Id of the token that stands for a piece of an image."""
SIDE, PATCH, SCALE = 112, 14, 2
IMAGE_TOKENS = (SIDE // PATCH // SCALE) ** 2
"""Such tokens of one image, whatever its size."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_vision_model(folder: Path, seed: int = 0) -> Path:
    """Write a Hugging Face folder (config, float32 weights, tokenizer, processors) and return it."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    make_tiny_model(folder, seed, added=ADDED, chat_template=CHAT_TEMPLATE)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(seed)
    config = Idefics3Config(
        text_config=_text(),
        vision_config=_vision(),
        image_token_id=IMAGE,
        scale_factor=SCALE,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        dtype="float32",
    )
    model = Idefics3ForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    with torch.no_grad():
        model.lm_head.weight[:3] = 0
        model.lm_head.weight[IMAGE:] = 0
    model.save_pretrained(folder)
    _write(folder / "preprocessor_config.json", _images())
    _write(
        folder / "processor_config.json",
        {"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS, "image_processor": _images()},
    )
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
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": PATCH,
    }


def _images() -> dict[str, Any]:
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_image_splitting": False,
        "size": {"longest_edge": SIDE},
        "max_image_size": {"longest_edge": SIDE},
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
