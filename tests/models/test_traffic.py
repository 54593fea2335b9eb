"""Tests what a pass reads, from made-up headers. tests/engine/llama/test_traffic.py compares it with llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from cpuchat.costs.model import bytes_read
from cpuchat.models.fit import windows_of
from cpuchat.models.gguf.parse import LazyArray
from cpuchat.models.traffic import model_work, table_bytes, typical_work
from cpuchat.protocol.model_info import ModelWork
from tests.models.test_fit import header_of

BOOL = 7  # GGUF value type


def layers(n: int, **more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return matrices of `n` layers of one head, and `more` with "." written as "__"."""
    named = {f"blk.{i}.{part}.weight": (64, 64) for i in range(n) for part in ("attn_k", "attn_v")}
    return named | {name.replace("__", "."): shape for name, shape in more.items()}


def metadata(n: int, **more: object) -> Mapping[str, object]:
    return {"a.block_count": n, "a.attention.head_count": 1, "a.embedding_length": 64} | {
        f"a.{name.replace('__', '.')}": value for name, value in more.items()
    }


def cache(work: ModelWork) -> list[tuple[float, int, int]]:
    """Return bytes per token, window and step of what is read of the KV cache."""
    return [(one.nbytes, one.window, one.step) for one in work.attention]


def test_a_model_with_a_head_of_its_own_reads_one_row_of_the_table() -> None:
    tensors = layers(2, token_embd__weight=(64, 1000), output__weight=(64, 1000))
    found = model_work(header_of(metadata(2), tensors))
    assert (found.weight_bytes, found.row) == (2 * (4 * 64 * 64 + 64 * 1000), 2 * 64)
    assert cache(found) == [(2 * 2 * 128, 0, 1)]


def test_tables_that_are_looked_up_by_layer_or_position_are_rows_too() -> None:
    tensors = layers(
        1, token_embd__weight=(64, 1000), output__weight=(64, 1000), per_layer_token_embd__weight=(32, 1000),
        position_embd__weight=(64, 512), blk__0__ffn_gate_tid2eid__weight=(6, 1000),
    )  # fmt: skip
    header = header_of(metadata(1), tensors)
    found = model_work(header)
    assert found.row == 2 * (64 + 32 + 64 + 6)
    assert found.weight_bytes == 2 * (2 * 64 * 64 + 64 * 1000)
    assert table_bytes(header) == 2 * (64 * 1000 + 32 * 1000 + 64 * 512 + 6 * 1000)
    assert header.n_params - header.n_params_active == 32 * 1000


def test_of_a_known_size_the_share_of_looked_up_tables_is_not_read() -> None:
    size, params = 3.11e9, 4.65e9
    found = bytes_read(typical_work(size, "Q4_K_M", params=params, id="gemma-4-e2b-it"), 1)
    assert found == pytest.approx(size * (params - 2.35e9) / params, rel=0.02)
    mixture = typical_work(111.3e9, "UD-Q4_K_XL", params=176e9, active=6 / 176, id="qwen3.8-flash-next")
    # The table of tokens is not read either.
    assert bytes_read(mixture, 1) == pytest.approx(111.3e9 * 6 / 176, rel=0.15)


def test_parts_that_do_not_write_text_are_left_out() -> None:
    tensors = layers(3, output__weight=(64, 10), v__blk__0__attn_q__weight=(64, 64), mm__0__weight=(64, 64))
    tensors |= {"blk.2.nextn.eh_proj.weight": (128, 64)}
    found = model_work(header_of(metadata(3, nextn_predict_layers=1), tensors))
    assert found.weight_bytes == 2 * (4 * 64 * 64 + 64 * 10)
    assert cache(found) == [(2 * 2 * 128, 0, 1)]


def test_routed_experts_are_told_apart_from_shared_ones() -> None:
    tensors = layers(1, output__weight=(64, 10))
    tensors |= {f"blk.0.ffn_{part}_exps.weight": (64, 256) for part in ("up", "gate", "down", "gate_up")}
    tensors |= {"blk.0.ffn_up_shexp.weight": (64, 32), "blk.0.ffn_gate_inp.weight": (64, 8)}
    found = model_work(header_of(metadata(1, expert_count=8, expert_used_count=2), tensors))
    assert sum(one.nbytes for one in found.experts) == 4 * 2 * 64 * 256
    assert sum(one.nbytes for one in (*found.dense, *found.head)) == 2 * (2 * 64 * 64 + 64 * (10 + 32 + 8))
    assert (found.n_expert, found.n_expert_used) == (8, 2)


def windows(architecture: str, n: int, **more: object) -> list[int]:
    values = {"general.architecture": architecture, f"{architecture}.block_count": n}
    values |= {f"{architecture}.attention.{name}": value for name, value in more.items()}
    return windows_of(header_of(values, layers(n)))


def test_windows_by_the_pattern_of_the_architecture() -> None:
    assert windows("gemma3", 7, sliding_window=512) == [512] * 5 + [0, 512]
    assert windows("gemma2", 4) == [4096, 0, 4096, 0]
    assert windows("gpt-oss", 3, sliding_window=128) == [128, 0, 128]
    assert windows("cohere2moe", 5, sliding_window=64) == [0, 64, 64, 64, 0]
    assert windows("llama4", 4) == [8192] * 3 + [0]
    assert windows("llama4", 4, sliding_window=0) == [0] * 4
    assert windows("lfm2", 2, sliding_window=64) == [64, 64]
    assert windows("smallthinker", 2) == [0, 0]
    assert windows("smallthinker", 2, sliding_window=99) == [0, 4096]


def test_windows_by_the_pattern_of_the_header() -> None:
    flags = LazyArray(BOOL, 3, np.array([1, 1, 0], np.uint8).tobytes())
    assert windows("gemma4", 4, sliding_window=512, sliding_window_pattern=flags) == [512, 512, 0, 0]
    assert windows("gemma3", 4, sliding_window=512, sliding_window_pattern=2) == [512, 0, 512, 0]


def test_windows_that_llama_cpp_does_not_use() -> None:
    assert windows("llama", 2, sliding_window=4096) == [0, 0]
    assert windows("phi3", 2, sliding_window=2047) == [0, 0]
    assert windows("exaone4", 30, sliding_window=4096) == [0] * 30
    assert windows("exaone4", 64, sliding_window=4096)[:4] == [4096, 4096, 4096, 0]


def test_layers_that_share_a_cache_read_that_of_their_kind() -> None:
    values = {
        "general.architecture": "gemma3n", "gemma3n.block_count": 6, "gemma3n.attention.sliding_window": 32,
        "gemma3n.attention.sliding_window_pattern": 2, "gemma3n.attention.shared_kv_layers": 2,
    }  # fmt: skip
    tensors = layers(4) | {"blk.3.attn_k.weight": (64, 128), "blk.3.attn_v.weight": (64, 128)}
    tensors |= {f"blk.{i}.attn_q.weight": (64, 64) for i in (4, 5)}
    # Windows on layers 0, 2, 4: the fourth's twin is layer 2, the fifth's is layer 3.
    found = model_work(header_of(values, tensors))
    assert cache(found) == [(2 * 128 + 2 * (2 * 256), 0, 1), (3 * 2 * 128, 32, 1)]
