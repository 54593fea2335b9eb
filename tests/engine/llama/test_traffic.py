"""Tests the estimate of what a pass reads, against what llama.cpp reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.costs.model import bytes_read
from cpuchat.models.gguf.header import read_model
from cpuchat.models.synthetic.model import Shape, write_model
from cpuchat.models.traffic import model_work
from cpuchat.protocol.options import EngineOptions
from tests.support.pair_files import write_pair
from tests.support.tensor_reads import Watched
from tests.support.tiny_gguf import Architecture, write_tiny_gguf

PASSES = [(1, 1), (100, 1), (300, 1), (300, 4)]
"""(tokens in the context, tokens of the pass). The first pass of all clears a recurrent state besides."""
TIED = Shape(
    name="t", architecture="qwen2", n_layer=2, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_vocab=1024, tied=True
)
EXPERTS = Shape(
    name="m", architecture="qwen3moe", n_layer=8, n_embd=256, n_head=4, n_head_kv=2, n_ff=256, n_vocab=1024, head=64,
    n_expert=32, n_expert_used=4,
)  # fmt: skip


Q8_0 = 8  # enum ggml_type


def check(path: Path, n_past: int, n: int, *, flash_attn: bool = True, **cache_types: int) -> float:
    """Return the estimate divided by what was read."""
    names = {name: "q8_0" for name in cache_types}
    work = model_work(read_model(path), EngineOptions(flash_attn="on" if flash_attn else "off", **names))
    with Watched(path, 512, flash_attn_type=int(flash_attn), **cache_types) as model:
        model.fill(n_past)
        reads = model.evaluate([100 + 9 * i for i in range(n)])
    return bytes_read(work, n, n_past) / reads.total


@pytest.mark.parametrize("arch", ["llama", "mamba", "jamba", "lfm2", "nemotron_h", "qwen35", "gemma3", "deepseek2"])
def test_every_byte_is_known(tmp_path: Path, arch: Architecture) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", arch=arch, n_layer=4)
    for n_past, n in PASSES:
        if arch != "deepseek2" or n == 1:  # which experts several tokens share is up to chance
            assert check(path, n_past, n) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(("arch", "n_past"), [("llama", 10), ("gemma3", 300)])
def test_without_flash_attention_the_cache_is_read_in_whole_steps(
    tmp_path: Path, arch: Architecture, n_past: int
) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", arch=arch)
    assert check(path, n_past, 1, flash_attn=False) == pytest.approx(1, abs=1e-9)
    assert check(path, n_past, 3, flash_attn=False) == pytest.approx(1, abs=1e-9)


def test_a_small_kv_cache_is_read_as_such(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", n_embd=128)
    assert check(path, 300, 1, type_k=Q8_0, type_v=Q8_0) == pytest.approx(1, abs=1e-9)


def test_tied_embeddings_are_read_as_the_output(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", TIED, "Q4_K_M")
    for n_past, n in PASSES:
        assert check(path, n_past, n) == pytest.approx(1, abs=1e-9)


def test_of_a_mixture_of_experts_those_that_the_tokens_use(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_pair(path, None, 1.0, target=EXPERTS)  # tokens choose their experts independently of each other
    assert check(path, 100, 1) == pytest.approx(1, abs=1e-9)
    assert check(path, 100, 5) == pytest.approx(1, abs=0.05)
