"""Headers that end the process of llama.cpp are refused before; each is tried there, too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpuchat.base.errors import ModelDamaged
from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.model import Model
from cpuchat.models.gguf.header import check_header, problems_of, read_model
from cpuchat.protocol.messages import LoadOptions
from tests.support.edited_gguf import edited
from tests.support.tiny_gguf import Architecture, vocabulary, write_tiny_gguf

pytestmark = pytest.mark.slow

HANG_GUARD = 300
_TOKENS = vocabulary()
_N = len(_TOKENS)


def tokens(**changes: str) -> dict[str, Any]:
    """Return the vocabulary with the token `t5` and so on replaced."""
    numbered = {int(name[1:]): text for name, text in changes.items()}
    return {"tokenizer.ggml.tokens": [numbered.get(i, text) for i, text in enumerate(_TOKENS)]}


# Name: (architecture, changes, what the refusal says). In llama.cpp they die, or never end.
FATAL: dict[str, tuple[Architecture, Mapping[str, Any], str]] = {
    "no layers": ("llama", {"llama.block_count": 0}, "has 0 layers"),
    "too many layers": ("llama", {"llama.block_count": 513}, "has 513 layers"),
    "predicting layers": ("llama", {"llama.nextn_predict_layers": 3}, "3 of its 2 layers"),
    "experts of none": ("llama", {"llama.expert_used_count": 2}, "2 of 0 experts"),
    "too many experts": ("deepseek2", {"deepseek2.expert_used_count": 9}, "9 of 8 experts"),
    "no experts used": ("deepseek2", {"deepseek2.expert_used_count": 0}, "0 of 8 experts"),
    "experts in every layer": ("deepseek2", {"deepseek2.expert_used_count": [2, 9]}, "9 of 8 experts"),
    "unlimited experts": ("deepseek2", {"deepseek2.expert_count": 2000}, "of 2000 experts"),
    "groups of one": ("deepseek2", {"deepseek2.expert_group_count": 8}, "8 experts would form 8 groups"),
    "uneven groups": (
        "deepseek2", {"deepseek2.expert_group_count": 3, "deepseek2.expert_group_used_count": 1}, "1 of 3 groups",
    ),
    "no groups used": (
        "deepseek2", {"deepseek2.expert_group_count": 2, "deepseek2.expert_group_used_count": 0}, "0 of 2 groups",
    ),
    "latent keys": ("deepseek2", {"deepseek2.attention.key_length": None}, "latent keys have 48 values"),
    "shared heads": ("deepseek2", {"deepseek2.attention.head_count_kv": 3}, "layer 0 has 4 attention heads"),
    "scaling": ("llama", {"llama.rope.scaling.type": "wild"}, "unknown RoPE scaling 'wild'"),
    "wide rope": ("gemma3", {"gemma3.rope.dimension_count": 32}, "32 of the 16 values"),
    "odd rope": ("gemma3", {"gemma3.rope.dimension_count": 3}, "3 of the 16 values"),
    "empty rope": ("gemma3", {"gemma3.rope.dimension_count": 0}, "0 of the 16 values"),
    "interval": ("qwen35", {"qwen35.full_attention_interval": 0}, "interval is 0"),
    "negative epsilon": ("llama", {"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon is -1"),
    "no number": ("llama", {"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
    "the same token": ("llama", tokens(t5=_TOKENS[4]), "tokens 4 and 5"),
    "the same to a NUL": ("llama", tokens(t5="a\0b"), "tokens 5 and 97 .* 'a'"),
    "an empty one's name": ("llama", tokens(t3="", t4="[EMPTY_3]"), r"tokens 3 and 4 .* '\[EMPTY_3\]'"),
    "bytes in WPM": (
        "llama", {"tokenizer.ggml.model": "bert", "tokenizer.ggml.token_type": [6] * _N}, "WPM vocabulary",
    ),
    "no bos": (
        "llama",
        {"tokenizer.ggml.model": "t5", "tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
        "adds a bos token",
    ),
}  # fmt: skip

# The tiny llama with the keys of another architecture, of which published files say that it rotates 0 dimensions.
_OCR = {
    "general.architecture": "deepseek2-ocr",
    "deepseek2-ocr.block_count": 2,
    "deepseek2-ocr.context_length": 4096,
    "deepseek2-ocr.embedding_length": 64,
    "deepseek2-ocr.feed_forward_length": 128,
    "deepseek2-ocr.leading_dense_block_count": 2,
    "deepseek2-ocr.expert_feed_forward_length": 128,
    "deepseek2-ocr.expert_shared_count": 0,
    "deepseek2-ocr.attention.head_count": 4,
    "deepseek2-ocr.attention.layer_norm_rms_epsilon": 1e-5,
    "deepseek2-ocr.rope.dimension_count": 0,
}

# These look odd, and work.
HARMLESS: dict[str, tuple[Architecture, Mapping[str, Any]]] = {
    "untouched": ("llama", {}),
    "empty tokens": ("llama", tokens(t3="", t4="")),
    "a NUL": ("llama", tokens(t5="\0a")),
    "special tokens out of range": (
        "llama", {"tokenizer.ggml.eos_token_id": 99_999, "tokenizer.ggml.eot_token_id": 99_999},
    ),
    "one epsilon too large": ("llama", {"llama.attention.layer_norm_rms_epsilon": 1e30}),
    "token types unknown": ("llama", {"tokenizer.ggml.token_type": [99] * _N}),
    "yarn": ("llama", {"llama.rope.scaling.type": "yarn"}),
    "more scores than tokens": ("llama", {"tokenizer.ggml.scores": np.zeros(_N + 5, np.float32)}),
    "no experts, no groups": ("llama", {"llama.expert_count": 0, "llama.expert_used_count": 0}),
    "recurrent": ("mamba", {}),
    "windows": ("gemma3", {}),
    "latent attention and experts": ("deepseek2", {}),
    "delta nets": ("qwen35", {}),
    "hybrid": ("jamba", {}),
    "short convolutions": ("lfm2", {}),
    "Mamba 2": ("nemotron_h", {}),
    "no rotated dimensions": ("llama", _OCR),
    "heads of every layer": ("llama", {"llama.attention.head_count": [4, 4], "llama.attention.head_count_kv": None}),
    "WPM adds no eos": (
        "llama",
        {
            "tokenizer.ggml.model": "bert", "tokenizer.ggml.token_type": [1] * _N,
            "tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.add_eos_token": True,
        },
    ),
    "RWKV adds no bos": (
        "llama",
        tokens(t5="\\n") | {
            "tokenizer.ggml.model": "rwkv", "tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True,
        },
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the file of a case, written once."""
    folder = tmp_path_factory.mktemp("checks")
    made: dict[str, Path] = {}

    def _model(name: str) -> Path:
        if name not in made:
            arch, changes = (FATAL[name] if name in FATAL else HARMLESS[name])[:2]
            base = folder / f"{arch}.gguf"
            if not base.exists():
                write_tiny_gguf(base, arch=arch)
            made[name] = edited(base, folder / f"case-{len(made)}.gguf", changes)
        return made[name]

    return _model


@pytest.fixture(scope="module")
def fates(model: Callable[[str], Path]) -> dict[str, str]:
    """Return how llama.cpp reacts to each file."""
    names = [*FATAL, *HARMLESS]
    command = [sys.executable, "-m", "tests.models.gguf.trial", *(str(model(name)) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


@pytest.mark.parametrize("name", FATAL)
def test_what_would_end_the_process_is_refused(name: str, model: Callable[[str], Path], fates: dict[str, str]) -> None:
    assert fates[name] in ("died", "endless")
    with pytest.raises(ModelDamaged, match=FATAL[name][2]) as caught:
        check_header(read_model(model(name)))
    assert model(name).name in caught.value.message and caught.value.hint


@pytest.mark.parametrize("name", HARMLESS)
def test_what_works_is_let_through(name: str, model: Callable[[str], Path], fates: dict[str, str]) -> None:
    assert fates[name] == "works"
    assert list(problems_of(read_model(model(name)))) == []


def test_the_engine_refuses_before_it_loads(model: Callable[[str], Path]) -> None:
    with pytest.raises(ModelDamaged, match="tokens 4 and 5 of its vocabulary are both"):
        Model.load(model("the same token"), LoadOptions(), (0,), on_progress=lambda *_: None, abort=AbortFlag())


def test_what_llama_cpp_refuses_itself_is_not_judged(tmp_path: Path) -> None:
    base = write_tiny_gguf(tmp_path / "tiny.gguf")
    changes = {"general.architecture": "flux", "flux.rope.scaling.type": "wild"}  # an image model: without layers
    assert list(problems_of(read_model(edited(base, tmp_path / "image.gguf", changes)))) == []


def test_vocabularies_without_weights_are_not_judged(tmp_path: Path) -> None:
    base = write_tiny_gguf(tmp_path / "tiny.gguf")
    header = read_model(edited(base, tmp_path / "bad.gguf", {"llama.block_count": 0}))
    assert list(problems_of(header))
    header.tensors.clear()
    assert list(problems_of(header)) == []
