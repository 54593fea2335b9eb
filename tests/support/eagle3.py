"""Draft heads of random weights and the usual sizes, for llama-server: their drafts are wrong, their costs are real."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from cpuchat.models.gguf.header import read_model
from cpuchat.models.gguf.parse import LazyArray
from cpuchat.models.synthetic.model import TensorSource, from_array, write_gguf

DRAFT_TOKENS = 32_768
"""Most tokens that a head can draft."""


def write_eagle3(file: Path, target: Path) -> None:
    """Write an EAGLE-3 head for `target`, a Llama: llama.cpp gives no hidden states of a Qwen2.

    Raises:
        ModelNotFound, ModelDamaged, ModelUnsupported: the target cannot be read.
    """
    header, random = read_model(target), np.random.default_rng(1)
    width, n_ff = header.n_embd, header.n_ff
    head, kv = header.key_length, header.heads_kv[0] * header.key_length
    last = header.n_layer - 1
    metadata: dict[str, object] = {
        "general.architecture": "eagle3",
        "general.name": file.stem,
        "general.file_type": 1,
        "eagle3.context_length": header.n_ctx_train,
        "eagle3.block_count": 1,
        "eagle3.embedding_length": width,
        "eagle3.feed_forward_length": n_ff,
        "eagle3.attention.head_count": header.n_head,
        "eagle3.attention.head_count_kv": header.heads_kv[0],
        "eagle3.rope.dimension_count": head,
        "eagle3.rope.freq_base": 1e6,
        "eagle3.attention.layer_norm_rms_epsilon": 1e-6,
        "eagle3.target_hidden_size": width,
        "eagle3.target_layers": np.array([1, last // 2, last - 1], np.int32),
    }
    for key, value in header.metadata.items():
        if key.startswith("tokenizer."):
            metadata[key] = value.first(len(value)) if isinstance(value, LazyArray) else value

    def matrix(name: str, rows: int, columns: int) -> TensorSource:
        return from_array(name, (random.standard_normal((rows, columns)) / 32).astype(np.float16), "F16")

    def norm(name: str) -> TensorSource:
        return from_array(name, np.ones(width, np.float32))

    tokens = min(DRAFT_TOKENS, header.n_vocab)
    tensors = [
        from_array("d2t", np.arange(tokens, dtype=np.int64), "I64"),
        matrix("fc.weight", width, 3 * width),
        norm("output_norm.weight"),
        matrix("output.weight", tokens, width),
        norm("blk.0.attn_norm.weight"),
        norm("blk.0.attn_norm_2.weight"),
        matrix("blk.0.attn_q.weight", header.n_head * head, 2 * width),
        matrix("blk.0.attn_k.weight", kv, 2 * width),
        matrix("blk.0.attn_v.weight", kv, 2 * width),
        matrix("blk.0.attn_output.weight", width, header.n_head * head),
        norm("blk.0.ffn_norm.weight"),
        matrix("blk.0.ffn_gate.weight", n_ff, width),
        matrix("blk.0.ffn_up.weight", n_ff, width),
        matrix("blk.0.ffn_down.weight", width, n_ff),
    ]
    write_gguf(file, metadata, tensors)
