"""Tests cpuchat's kernels: their products against exact ones, bit by bit over passes, and in models that they load.

They exist for x86 with AVX2; elsewhere llama.cpp's are used, and only that is tested.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest

from cpuchat.base import paths
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama import kernels as selected
from cpuchat.engine.llama.model import Model
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.hardware.topology import instructions
from cpuchat.models import kernels
from cpuchat.models.synthetic.model import SHAPES, write_model
from tests.support.engine_chat import OPTIONS

DEMO = paths.demo_dir() / "cpuchat-demo-8m-q4_k_m.gguf"
HERE = kernels.instructions_used(instructions())
WIDEST_FIRST = ("AVX-512 VNNI", "AVX-VNNI", "AVX2")
SETS = WIDEST_FIRST[WIDEST_FIRST.index(HERE) :] if HERE else ()
needs_kernels = pytest.mark.skipif(not HERE, reason="cpuchat's kernels are for x86 with AVX2")
AUTO = msgspec.structs.replace(OPTIONS, kernels="auto")


def multiplied(instruction_set: str, kind: str, raw: np.ndarray, x: np.ndarray, n_rows: int) -> np.ndarray:
    """Return the products of quantized rows with float rows, by the library's own entry for tests."""
    assert selected.select("auto")
    library = bindings.kernels_library
    out = np.full((len(x), n_rows), np.nan, np.float32)
    x = np.ascontiguousarray(x)
    rows, columns, pointer = ctypes.c_int64(n_rows), ctypes.c_int64(x.shape[1]), ctypes.c_void_p
    failed = library.cpuchat_kernels_multiply(
        instruction_set.encode(), kernels.TYPES.index(kind), columns, rows, pointer(raw.ctypes.data),
        pointer(x.ctypes.data), ctypes.c_int64(len(x)), pointer(out.ctypes.data),
    )  # fmt: skip
    assert failed == 0
    return out


def rows_of_blocks(rng: np.random.Generator, kind: str, n_rows: int, n_values: int) -> np.ndarray:
    """Return random blocks: all bits of weights and scales, and scales of a block that are ordinary halves."""
    kind_number = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[kind_number]
    raw = rng.integers(0, 256, (n_rows, n_values // values, size), dtype=np.uint8)
    halves = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for at in halves:
        d = (rng.standard_normal(raw.shape[:2]) * 1e-2).astype(np.float16)
        raw[:, :, at : at + 2] = d[..., None].view(np.uint8)
    return raw.reshape(n_rows, -1)


@needs_kernels
@pytest.mark.parametrize("kind", kernels.TYPES)
@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize(("n_rows", "n_values"), [(1, 256), (16, 256), (33, 512), (8, 1536)])
def test_products_are_those_of_the_dequantized_weights(
    kind: str, instruction_set: str, n_rows: int, n_values: int
) -> None:
    rng = np.random.default_rng(n_rows * n_values)
    raw = rows_of_blocks(rng, kind, n_rows, n_values)
    weights = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).astype(np.float64)
    x = (rng.standard_normal((5, n_values)) * np.array([[1], [1e-3], [1e4], [1], [0]])).astype(np.float32)
    # The activations as 8 bits of each block, as llama.cpp quantizes them.
    size = 256 if kind.endswith("K") else 32
    blocks = x.reshape(5, -1, size)
    top = np.abs(blocks).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    rounded = np.rint(blocks * inverse).astype(np.float64) * (top / np.float32(127)).astype(np.float64)
    exact = rounded.reshape(5, -1) @ weights.T
    found = multiplied(instruction_set, kind, raw, x, n_rows)
    scale = np.abs(rounded.reshape(5, -1)) @ np.abs(weights).T + 1e-30
    assert (np.abs(found - exact) / scale).max() < 1e-5


@needs_kernels
@pytest.mark.parametrize("kind", kernels.TYPES)
def test_a_token_has_the_same_bits_in_every_pass_and_instruction_set(kind: str) -> None:
    rng = np.random.default_rng(7)
    raw = rows_of_blocks(rng, kind, 40, 768)
    x = rng.standard_normal((64, 768)).astype(np.float32)
    alone = np.concatenate([multiplied("AVX2", kind, raw, x[i : i + 1], 40) for i in range(64)])
    for instruction_set in SETS:
        for n in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 31, 33, 64):
            together = multiplied(instruction_set, kind, raw, x[:n], 40)
            assert np.array_equal(together.view(np.uint32), alone[:n].view(np.uint32)), (instruction_set, n)


def logits(model: Model, tokens: list[int], widths: list[int]) -> np.ndarray:
    """Return the last logits after `tokens`, evaluated in passes of `widths`."""
    model.sequence.clear()
    for width in widths:
        model.sequence.extend(tokens[:width], n_outputs=1)
        tokens = tokens[width:]
    return model.sequence.logits(-1).copy()


@needs_kernels
def test_a_model_computes_with_them_and_llama_cpp_s_again_afterwards(load: Callable[..., Model]) -> None:
    tokens = list(range(300, 324))
    ours, theirs = load(DEMO, AUTO), load(DEMO)
    evidence = ours.info.evidence
    assert evidence is not None and theirs.info.evidence is not None
    assert {one.type for one in evidence.weights if one.buffer == "CPU_CPUCHAT"} == {"q4_K", "q6_K"}
    assert not any(one.buffer == "CPU_CPUCHAT" for one in theirs.info.evidence.weights)
    found = logits(ours, tokens, [24])
    assert np.array_equal(found, logits(ours, tokens, [1] * 24))
    expected = logits(theirs, tokens, [24])
    assert np.abs(found - expected).max() < 0.05 * np.ptp(expected)
    assert found.argmax() == expected.argmax()


LONG = msgspec.structs.replace(AUTO, n_ctx=1024, n_batch=512, n_ubatch=512)
TEXT = [40 + i * 37 % 400 for i in range(632)]


@needs_kernels
def test_drafts_behind_a_long_text_change_no_bit(load: Callable[..., Model]) -> None:
    # llama.cpp's attention of one token is computed in parts, one for each thread, from 512 cells of the cache on.
    model = load(DEMO, LONG, threads=own_cpus()[:2])
    found = logits(model, TEXT, [512, 88, *[1] * 32])
    assert np.array_equal(found, logits(model, TEXT, [512, 88, 3, 29]))
    assert np.array_equal(found, logits(model, TEXT, [512, 88, 32]))
    assert np.array_equal(found, logits(model, TEXT, [300, 332]))


@needs_kernels
@pytest.mark.parametrize("name", ["demo", "27b-gemma3", "0.5b"])
def test_attention_is_that_of_llama_cpp(name: str, tmp_path: Path, load: Callable[..., Model]) -> None:
    file = DEMO
    if name != "demo":  # windows and heads of 32; 7 heads for each of the cache
        heads = {"n_head": 4, "n_head_kv": 2, "head": 32} if name == "27b-gemma3" else {"n_head": 14, "head": 16}
        shape = msgspec.structs.replace(
            SHAPES[name], name="tiny", n_layer=6, n_embd=224, n_ff=256, n_vocab=512, **heads,
            window=min(SHAPES[name].window, 96),
        )  # fmt: skip
        file = write_model(tmp_path / "tiny.gguf", shape, "Q8_0")
    # An F32 cache is left to llama.cpp.
    exact = load(file, msgspec.structs.replace(LONG, type_k="f32", type_v="f32"))
    for widths in ([512, 88, *[1] * 32], [512, 88, 32], [20, 30]):
        expected = logits(exact, TEXT, widths)
        found = logits(load(file, LONG), TEXT, widths)
        assert np.abs(found - expected).max() < 0.01 * np.ptp(expected)


@needs_kernels
@pytest.mark.parametrize("kind", ["Q4_K_M", "Q8_0"])
def test_experts_compute_with_them(kind: str, tmp_path: Path, load: Callable[..., Model]) -> None:
    shape = msgspec.structs.replace(
        SHAPES["30b-a3b"], name="tiny-moe", n_layer=3, n_embd=512, n_head=2, n_head_kv=1, n_ff=256, n_vocab=512,
        head=128, n_expert=48, n_expert_used=6, n_ctx=1024,
    )  # fmt: skip
    file = write_model(tmp_path / "moe.gguf", shape, kind)
    tokens = list(range(40, 60))
    ours, theirs = load(file, AUTO), load(file)
    assert ours.info.evidence is not None
    assert any(one.buffer == "CPU_CPUCHAT" for one in ours.info.evidence.weights)
    found, expected = logits(ours, tokens, [20]), logits(theirs, tokens, [20])
    assert np.array_equal(found, logits(ours, tokens, [1, 7, 12]))
    assert np.array_equal(found, logits(ours, tokens, [1] * 20))  # the router's F32 products, too
    assert np.abs(found - expected).max() < 0.05 * np.ptp(expected)


def test_without_the_library_llama_cpp_computes(load: Callable[..., Model], monkeypatch: pytest.MonkeyPatch) -> None:
    selected.select("llama.cpp")
    monkeypatch.setattr(bindings, "kernels_library", None)
    model = load(DEMO, AUTO)
    assert model.info.evidence is not None
    assert not any(one.buffer == "CPU_CPUCHAT" for one in model.info.evidence.weights)


@needs_kernels
def test_a_library_of_another_engine_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bindings._open_kernels() is not None
    monkeypatch.setattr(bindings, "ggml_version", lambda: b"0.0.1")
    assert bindings._open_kernels() is None
