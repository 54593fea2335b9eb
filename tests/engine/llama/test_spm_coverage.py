"""Tests vocabularies that cannot write every text: llama.cpp would end the process on the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from cpuchat.base.errors import GenerationFailed
from cpuchat.engine.llama.model import Model
from tests.support.edited_gguf import edited
from tests.support.tiny_gguf import vocabulary

Load = Callable[..., Model]
_N = len(vocabulary())
_WORDS = ["<unk>", "<s>", "</s>", "▁", "é", *"Helo, wrd", "He", "🙂"]
_CONTROL, _BYTE = 3, 6


def sentences(
    model: Path, out: Path, changes: Mapping[str, Any] = MappingProxyType({}), more: Sequence[str] = ()
) -> Path:
    """Return the tiny model with the vocabulary of a SentencePiece model: `_WORDS`, `more`, and as many others as
    needed."""
    words = [*_WORDS, *more]
    types = [2, _CONTROL, _CONTROL, *(1 if word[:3] != "<0x" else _BYTE for word in words[3:])]
    others = _N - len(words)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": words + [f"[PAD{i}]" for i in range(others)],
        "tokenizer.ggml.token_type": np.array(types + [5] * others, np.int32),
        "tokenizer.ggml.scores": np.zeros(_N, np.float32),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return edited(model, out, metadata | dict(changes))


def test_what_cannot_be_written_is_refused_and_the_model_lives(load: Load, tiny_model: Path, tmp_path: Path) -> None:
    file = sentences(tiny_model, tmp_path / "words.gguf")
    vocab = load(file, visible_markers=("<think>", "</s>")).vocab
    for text, character in (("Hello\n", "\n"), ("Wor", "W"), ("ü", "ü")):
        with pytest.raises(GenerationFailed) as caught:
            vocab.tokenize(text.encode(), add_special=False)
        assert f"no token for {character!r}" in caught.value.message and caught.value.hint
    assert vocab.tokenize("<s>He llé 🙂</s>".encode(), add_special=False) == [
        _WORDS.index(word) for word in ("<s>", "▁", "He", "▁", "l", "l", "é", "▁", "🙂", "</s>")
    ]


def test_a_leading_space_must_be_there_when_it_is_added(load: Load, tiny_model: Path, tmp_path: Path) -> None:
    words = {"tokenizer.ggml.tokens": [f"t{i}" if i != 9 else "a" for i in range(_N)]}
    adding = load(sentences(tiny_model, tmp_path / "adding.gguf", words)).vocab
    with pytest.raises(GenerationFailed, match="▁"):
        adding.tokenize(b"a", add_special=False)
    plain = sentences(tiny_model, tmp_path / "plain.gguf", words | {"tokenizer.ggml.add_space_prefix": False})
    assert load(plain).vocab.tokenize(b"aa", add_special=False) == [9, 9]
