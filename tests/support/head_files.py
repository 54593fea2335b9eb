"""Small files of models and of draft heads: headers to compare, without useful weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cpuchat.models.synthetic.model import from_array, write_gguf

WORDS = [f"w{i}" for i in range(300)]


def target_file(path: Path, *, n_mtp: int = 0, architecture: str = "llama") -> Path:
    """Write a model of 4 layers, the last `n_mtp` of which are MTP layers."""
    metadata = _metadata(path, architecture, 64, 4, WORDS)
    if n_mtp:
        metadata[f"{architecture}.nextn_predict_layers"] = n_mtp
    names = [f"blk.{layer}.attn_norm.weight" for layer in range(4)]
    names += [f"blk.{3 - number}.nextn.enorm.weight" for number in range(n_mtp)]
    return _write(path, metadata, names)


def tap_head_file(
    path: Path,
    *,
    architecture: str = "eagle3",
    n_embd: int = 64,
    layers: Sequence[int] = (0, 1, 2),
    tokens: Sequence[str] | None = WORDS,
) -> Path:
    """Write an EAGLE-3 or DFlash head that reads hidden states of `n_embd` values from these layers of its target."""
    metadata = _metadata(path, architecture, 32, 1, tokens)
    metadata[f"{architecture}.target_hidden_size"] = n_embd
    metadata[f"{architecture}.target_layers"] = np.array(layers, np.int32)
    return _write(path, metadata, ["blk.0.attn_norm.weight"])


def mtp_head_file(path: Path, *, architecture: str = "llama", n_embd: int = 64, n_layers: int = 1) -> Path:
    """Write the MTP layer of a model in a file of its own, which says that there are `n_layers`."""
    metadata = _metadata(path, architecture, n_embd, 4, None)
    metadata[f"{architecture}.nextn_predict_layers"] = n_layers
    return _write(path, metadata, ["blk.3.nextn.enorm.weight"])


def _metadata(
    path: Path, architecture: str, n_embd: int, n_layer: int, tokens: Sequence[str] | None
) -> dict[str, object]:
    metadata: dict[str, object] = {
        "general.architecture": architecture,
        "general.name": path.stem,
        f"{architecture}.block_count": n_layer,
        f"{architecture}.embedding_length": n_embd,
        f"{architecture}.attention.head_count": 4,
        f"{architecture}.attention.head_count_kv": 2,
    }
    if tokens is not None:
        metadata |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": list(tokens),
            "tokenizer.ggml.merges": ["a b"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
        }
    return metadata


def _write(path: Path, metadata: dict[str, object], names: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_gguf(path, metadata, [from_array(name, np.ones(32, np.float32)) for name in names])
