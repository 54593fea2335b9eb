"""Tests what a header leaves out of its vocabulary, against what llama.cpp makes of it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
import pytest

from cpuchat.models.gguf.header import read_header, vocabulary
from tests.support.edited_gguf import edited
from tests.support.tiny_gguf import vocabulary as tiny_vocabulary

_N = len(tiny_vocabulary())
_IDS = [f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos")]
_UNSAID = dict.fromkeys([*_IDS, "tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"])


@llama.llama_log_callback
def _quiet(_level: int, _text: bytes, _user: Any) -> None:
    pass


def of_llama_cpp(path: Path) -> tuple[bool, bool, int, int]:
    """Return (adds bos, adds eos, bos, eos) from llama.cpp."""
    llama.llama_log_set(_quiet, ctypes.c_void_p(0))
    params = llama.llama_model_default_params()
    params.vocab_only = True
    model = llama.llama_model_load_from_file(str(path).encode(), params)
    assert model
    vocab: Any = llama.llama_model_get_vocab(model)
    adds = llama.llama_vocab_get_add_bos(vocab), llama.llama_vocab_get_add_eos(vocab)
    ids = llama.llama_vocab_bos(vocab), llama.llama_vocab_eos(vocab)
    llama.llama_model_free(model)
    return bool(adds[0]), bool(adds[1]), int(ids[0]), int(ids[1])


_PRE = ("", "gpt-2", "llama-bpe", "lfm2", "tekken", "qwen2", "glm4", "chatglm-bpe", "gemma4", "kimi-k2")
CASES: dict[str, dict[str, Any]] = {
    **{f"BPE {pre}": {"tokenizer.ggml.pre": pre} for pre in _PRE},
    **{kind: {"tokenizer.ggml.model": kind} for kind in ("llama", "bert", "t5", "gemma4", "whitespace")},
    "rwkv": {"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": [f"t{i}" if i else "\\n" for i in range(_N)]},
    "few tokens": {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.token_type": np.ones(2, np.int32),
    },
    "said": dict(zip(_IDS, (3, 4), strict=True)) | {"tokenizer.ggml.add_eos_token": True},
    "out of range": dict.fromkeys(_IDS, 9999) | {"tokenizer.ggml.add_bos_token": True},
    "gemma4 wants none": {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.add_bos_token": False},
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_completed_as_llama_cpp_does(name: str, tiny_model: Path, tmp_path: Path) -> None:
    types = {"tokenizer.ggml.token_type": np.ones(_N, np.int32), "tokenizer.ggml.scores": None}
    file = edited(tiny_model, tmp_path / "m.gguf", _UNSAID | types | CASES[name])
    found = vocabulary(read_header(file))
    assert (found.add_bos, found.add_eos, found.bos, found.eos) == of_llama_cpp(file)
