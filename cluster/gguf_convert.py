"""Turn a GGUF file into a Hugging Face folder. Run as a script, so that its memory is gone when it ends.

    python -P gguf_convert.py FILE FOLDER DTYPE

Progress goes to stderr as tqdm bars; `cluster.models` reads their percentages.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(source: Path, target: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )
    # The quantisation was undone; what is written is a plain model, and its config must say so.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
