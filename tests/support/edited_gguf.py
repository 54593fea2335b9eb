"""Sound models with single values of their header changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from cpuchat.models.gguf.header import read_header
from cpuchat.models.gguf.parse import LazyArray, TensorInfo
from cpuchat.models.synthetic.model import TensorSource, write_gguf
from tests.support.tiny_gguf import vocabulary


def edited(model: Path, out: Path, changes: Mapping[str, Any]) -> Path:
    """Write `model` to `out` with these metadata values; None removes a key."""
    header = read_header(model)
    data = model.read_bytes()[header.data_offset :]

    def source(tensor: TensorInfo) -> TensorSource:
        content = data[tensor.offset : tensor.offset + tensor.nbytes]
        return TensorSource(tensor.name, tensor.shape, tensor.type, lambda: (content,))

    metadata = {key: _writable(value) for key, value in header.metadata.items()} | dict(changes)
    kept = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(out, kept, [source(tensor) for tensor in header.tensors])


def _writable(value: Any) -> Any:
    if not isinstance(value, LazyArray) or value.is_text:
        return list(value) if isinstance(value, LazyArray) else value
    return np.array(list(value), np.float32 if value.value_type == 6 else np.int32)


def sentences(
    model: Path, out: Path, changes: Mapping[str, Any] = MappingProxyType({}), more: Sequence[str] = ()
) -> Path:
    """Return the tiny model with a vocabulary of SentencePiece: some words, `more`, bytes, and what else it needs."""
    words = ["<unk>", "<s>", "</s>", "▁", "é", *"Helo, wrd", "He", "🙂"]
    words += [f"<0x{byte:02X}>" for byte in range(256) if chr(byte) not in words[5:-2]] + [*more]
    types = [2, 3, 3, *(6 if word.startswith("<0x") else 1 for word in words[3:])]
    others = len(vocabulary()) - len(words)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words + [f"[PAD{i}]" for i in range(others)],
        "tokenizer.ggml.token_type": np.array(types + [5] * others, np.int32),
        "tokenizer.ggml.scores": np.zeros(len(vocabulary()), np.float32),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return edited(model, out, metadata | dict(changes))


FILL_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
"""Names by which llama.cpp finds the tokens for filling in; Qwen's."""


def filling(model: Path, out: Path, names: Sequence[str] = FILL_TOKENS) -> Path:
    """Return the tiny model with these tokens for filling in, in place of bytes that no UTF-8 has."""
    tokens, types = vocabulary(), read_header(model).metadata["tokenizer.ggml.token_type"]
    kinds = np.array(list(types), np.int32)
    for at, name in enumerate(names, 0xF5):
        tokens[at], kinds[at] = name, 3  # control
    return edited(model, out, {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds})
