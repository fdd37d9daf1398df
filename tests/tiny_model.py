"""A random two-layer Llama with a tokenizer of its own, written in well under a second and without a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 2, 2, 1, 32, 128
VOCAB = 448
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
PAD, BOS, EOS = range(3)

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TRAINING_TEXT = (
    "You are a helpful assistant. Answer in one short sentence. What is the capital of France?",
    "The capital of France is Paris. The river that runs through the city is the Seine.",
    "A prefix is computed once, kept where it is cheap, and moved when that beats computing it again.",
    "The router sends a request to the replica that already holds the longest prefix of its prompt.",
    "Tokens, blocks, chunks and keys; system, user, assistant; one, two, three, four, five, six, seven.",
    "Write a function that sorts a list of numbers, and explain how long it takes when the list grows.",
)


def make_tiny_model(
    folder: Path,
    seed: int = 0,
    max_len: int = 8192,
    added: Sequence[str] = (),
    chat_template: str = CHAT_TEMPLATE,
) -> Path:
    """Write a Hugging Face folder (config, float32 weights, tokenizer with chat template) and return it.

    Same seed, same bytes. Greedy answers depend on the whole prompt and do not end by themselves: the end token is
    practically never the best one, so `max_tokens` says how long an answer is. `added`: texts that are one token each,
    the last ids of the vocabulary; answers hold none of them unless they are made to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(max_len))
    _write_json(
        folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    )
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(max_len, chat_template))
    _tokenizer(added).save(str(folder / "tokenizer.json"))
    weights = _weights(np.random.default_rng(seed))
    weights["lm_head.weight"][VOCAB - len(added) :] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _config(max_len: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def _tokenizer_config(max_len: int, chat_template: str) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[PAD],
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "model_max_length": max_len,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }


def _tokenizer(added: Sequence[str]) -> Tokenizer:
    """Byte-level BPE: any text has tokens, and every token has text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(added),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def _weights(random: np.random.Generator) -> dict[str, np.ndarray]:
    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * (scale / np.sqrt(columns))).astype(np.float32)

    # Small embeddings and sharp attention let the whole prompt speak, not its last token alone; a large output head
    # keeps logits far enough apart that greedy decoding does not hang on rounding.
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB, HIDDEN, scale=2),
    }
    weights["lm_head.weight"][: len(SPECIAL)] = 0
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN, scale=2),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, scale=2),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{name}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
            f"{name}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{name}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
    return weights


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
