"""Tests synthetic models: valid for the reference reader, sane numbers, and llama.cpp says what the table says."""

from __future__ import annotations

from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from cpuchat.models.gguf.parse import BY_NAME
from cpuchat.models.synthetic.model import (
    FIRST_WORD,
    RANDOM_TYPES,
    SHAPES,
    Shape,
    random_rows,
    tensor_type,
    write_model,
)
from tests.models.llama import Llama
from tests.support.pair_files import draft_token_table, next_token_table, write_pair
from tests.support.shapes import TINY_LLAMA, TINY_MOE, word


@pytest.mark.parametrize("kind", RANDOM_TYPES)
def test_random_weights_are_spread_as_asked(kind: str) -> None:
    rng = np.random.default_rng(1)
    data = random_rows(kind, rng, 1 << 16, 0.02)
    assert data.nbytes == (1 << 16) // BY_NAME[kind].block * BY_NAME[kind].nbytes
    values = reference.quants.dequantize(data, reference.GGMLQuantizationType[kind]).astype(np.float64)
    assert np.isfinite(values).all()
    # Scales of MXFP4 are powers of 2; the other types hit the spread.
    assert values.std() == pytest.approx(0.02, rel=0.42 if kind == "MXFP4" else 0.03)
    assert abs(values.mean()) < 0.0005


@pytest.mark.parametrize(("shape", "quant"), [("tiny", "Q3_K"), (TINY_LLAMA, "Q4_K_M"), (TINY_MOE, "MXFP4")], ids=str)
def test_llama_cpp_runs_every_kind(shape: str | Shape, quant: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", shape, quant)
    with Llama(path) as llama:
        assert len(llama.greedy([300, 301, 302], 3)) == 3


def test_any_text_becomes_tokens_and_comes_back(tmp_path: Path) -> None:
    with Llama(write_model(tmp_path / "m.gguf", "tiny")) as llama:
        for text in ("Hello, wörld\n\t🙂  <html>", " a zz abc", "one two"):
            assert llama.text(llama.tokens(text)) == text
        words = [FIRST_WORD + i for i in (0, 25, 26, 700, 1700)]
        assert llama.text(words) == "".join(word(i) for i in (0, 25, 26, 700, 1700))
        assert llama.tokens(llama.text(words)) == words
        assert llama.tokens("<|im_start|>user\n")[0] == 3


@pytest.mark.parametrize(("name", "billions"), [("0.5b", 0.49), ("7b", 7.61), ("70b", 70.6), ("30b-a3b", 30.5)])
def test_shapes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    s = SHAPES[name]
    attention = s.n_embd * s.head_size * 2 * (s.n_head + s.n_head_kv)
    per_layer = attention + 3 * s.n_embd * s.n_ff * max(s.n_expert, 1) + s.n_embd * s.n_expert
    total = s.n_layer * per_layer + s.n_vocab * s.n_embd * (1 if s.tied else 2)
    assert total / 1e9 == pytest.approx(billions, rel=0.01)


def test_mixes_follow_llama_quantize() -> None:
    big = SHAPES["1.5b"]
    down = [tensor_type(big, "Q4_K_M", f"blk.{i}.ffn_down.weight", 8960) for i in range(28)]
    assert [i for i, kind in enumerate(down) if kind == "Q6_K"] == [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]
    assert tensor_type(big, "Q4_K_M", "blk.3.attn_q.weight", 1536) == "Q4_K"
    assert tensor_type(big, "Q4_K_M", "token_embd.weight", 1536) == "Q6_K"  # tied
    assert tensor_type(SHAPES["7b"], "Q4_K_M", "token_embd.weight", 3584) == "Q4_K"
    assert tensor_type(SHAPES["7b"], "Q4_K_M", "output.weight", 3584) == "Q6_K"
    assert tensor_type(SHAPES["70b"], "Q4_K_M", "blk.12.attn_v.weight", 8192) == "Q6_K"
    assert tensor_type(SHAPES["70b"], "Q4_K_M", "blk.13.attn_v.weight", 8192) == "Q5_K"
    small = SHAPES["0.5b"]  # rows of 896 are no multiple of 256
    assert tensor_type(small, "Q4_K_M", "blk.3.attn_q.weight", 896) == "Q5_0"
    assert tensor_type(small, "Q4_K_M", "blk.0.attn_v.weight", 896) == "Q8_0"
    assert tensor_type(small, "Q4_K_M", "token_embd.weight", 896) == "Q8_0"
    assert tensor_type(small, "Q8_0", "blk.3.attn_q.weight", 896) == "Q8_0"


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K_M"])
def test_llama_cpp_follows_the_table(quant: str, tmp_path: Path) -> None:
    target, draft = tmp_path / "t.gguf", tmp_path / "d.gguf"
    write_pair(target, draft, 0.7, target="tiny", draft=TINY_LLAMA, quant=quant, seed=5)
    tables = {target: next_token_table(2048, 5), draft: draft_token_table(2048, 0.7, 5)}
    for path, table in tables.items():
        for start in (7, 300):  # a byte, a word
            expected, token = [], start
            for _ in range(60):
                token = int(table[token])
                expected.append(token)
            with Llama(path) as llama:
                assert llama.greedy([400, 401, start], 60) == expected
