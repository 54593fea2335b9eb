"""Model files for the local hub: sound headers, of any length, with little behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cpuchat.models.synthetic.model import from_array, write_gguf


def write_model_file(path: Path, *, n_tokens: int = 100, part: int = 1, parts: int = 1) -> Path:
    """Write a file with a vocabulary of `n_tokens` (50 bytes of header each) and one tensor of `n_values` floats."""
    metadata: dict[str, Any] = {"general.architecture": "llama", "llama.block_count": 2, "general.file_type": 0}
    if part == 1:
        metadata["tokenizer.ggml.tokens"] = [f"{n:042d}" for n in range(n_tokens)]
    if parts > 1:
        metadata |= {"split.no": part - 1, "split.count": parts}
    tensor = from_array(f"blk.{part - 1}.attn_k.weight", np.zeros((1024, 64), np.float32))
    return write_gguf(path, metadata, [tensor])
