"""Writes models of random weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cpuchat.errors import Interrupted, UsageError
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.parse import TensorInfo
from cpuchat.models.gguf.types import ALIGNMENT
from cpuchat.synthetic.blocks import RANDOM_TYPES, random_rows
from cpuchat.synthetic.gguf_writer import Chunks, TensorSource, from_array, write_gguf
from cpuchat.synthetic.shapes import Shape, file_type, shape_of, tensor_type
from cpuchat.synthetic.vocab import CHATML, FIRST_WORD, Vocab, vocab_metadata

CHUNK_VALUES = 4 << 20
# Standard deviation of weights, as in a freshly initialised transformer.
STD = 0.02
_MIXES = ("Q4_K_M", "Q4_K_S", "Q5_K_M", "Q5_K_S")


def generator(seed: int, name: str) -> np.random.Generator:
    """Return a separate random stream for every tensor, so that content does not depend on the write order."""
    return np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))


def random_tensor(name: str, shape: tuple[int, ...], kind: str, seed: int, std: float) -> TensorSource:
    """Return a matrix of random weights; `shape` in GGML's order."""
    row, rows = shape[0], int(np.prod(shape[1:], dtype=np.int64))
    step = max(CHUNK_VALUES // row, 1)

    def chunks() -> Iterator[np.ndarray[Any, Any]]:
        rng = generator(seed, name)
        for start in range(0, rows, step):
            yield random_rows(kind, rng, min(step, rows - start) * row, std)

    return TensorSource(name, shape, kind, chunks)


def metadata(shape: Shape, quant: str, name: str, vocab: Vocab, template: str | None) -> dict[str, Any]:
    """Return the metadata of a model."""
    values = shape_metadata(shape, quant, name)
    return values | vocab_metadata(shape.architecture, shape.n_vocab, vocab, template)


def shape_metadata(shape: Shape, quant: str, name: str) -> dict[str, Any]:
    """Return the metadata of a model without those of its tokenizer."""
    a = shape.architecture
    values: dict[str, Any] = {
        "general.architecture": a,
        "general.name": name,
        "general.type": "model",
        "general.file_type": file_type(quant),
        f"{a}.block_count": shape.n_layer,
        f"{a}.context_length": shape.n_ctx,
        f"{a}.embedding_length": shape.n_embd,
        f"{a}.feed_forward_length": shape.n_ff * max(shape.n_expert_used, 1),
        f"{a}.attention.head_count": shape.n_head,
        f"{a}.attention.head_count_kv": shape.n_head_kv,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{a}.rope.freq_base": shape.rope_base,
        f"{a}.rope.dimension_count": shape.head_size,
    }
    if shape.head:
        values |= {f"{a}.attention.key_length": shape.head, f"{a}.attention.value_length": shape.head}
    if shape.window:
        values[f"{a}.attention.sliding_window"] = shape.window
    if shape.n_expert:
        values |= {
            f"{a}.expert_count": shape.n_expert,
            f"{a}.expert_used_count": shape.n_expert_used,
            f"{a}.expert_feed_forward_length": shape.n_ff,
        }
    return values


def layer_tensors(
    shape: Shape, quant: str, seed: int, std: Callable[[str, int], float] = lambda name, row: STD
) -> Iterator[TensorSource]:
    """Yield the tensors of all layers. `std(name, row)` is the spread of matrix `name` with rows of `row` values."""
    h, ff = shape.n_embd, shape.n_ff
    q, kv = shape.n_head * shape.head_size, shape.n_head_kv * shape.head_size
    matrices: list[tuple[str, tuple[int, ...]]] = [
        ("attn_q", (h, q)),
        ("attn_k", (h, kv)),
        ("attn_v", (h, kv)),
        ("attn_output", (q, h)),
    ]
    if shape.n_expert:
        n = shape.n_expert
        matrices += [("ffn_gate_exps", (h, ff, n)), ("ffn_up_exps", (h, ff, n)), ("ffn_down_exps", (ff, h, n))]
    else:
        matrices += [("ffn_gate", (h, ff)), ("ffn_up", (h, ff)), ("ffn_down", (ff, h))]
    norms = {"attn_norm": h, "ffn_norm": h}
    if shape.architecture in ("qwen3moe", "gemma3"):
        norms |= {"attn_q_norm": shape.head_size, "attn_k_norm": shape.head_size}
    if shape.architecture == "gemma3":
        norms |= {"post_attention_norm": h, "post_ffw_norm": h}
    for layer in range(shape.n_layer):
        prefix = f"blk.{layer}."
        for norm, size in norms.items():
            yield from_array(f"{prefix}{norm}.weight", np.ones(size, np.float32))
        if shape.n_expert:
            yield random_tensor(f"{prefix}ffn_gate_inp.weight", (h, shape.n_expert), "F32", seed, STD)
        for name, size in matrices:
            full = f"{prefix}{name}.weight"
            kind = tensor_type(shape, quant, full, size[0])
            yield random_tensor(full, size, kind, seed, std(name, size[0]))
            if shape.architecture == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                yield from_array(f"{prefix}{name}.bias", np.zeros(size[1], np.float32))


def check(shape: Shape, quant: str, types: tuple[str, ...]) -> None:
    """Raise UsageError when a tensor needs a type that is not in `types`, or the vocabulary is too small."""
    if shape.n_vocab <= FIRST_WORD:
        raise UsageError(f"A vocabulary of {shape.n_vocab} tokens is too small.", f"Use more than {FIRST_WORD}.")
    file_type(quant)
    rows = {"token_embd.weight": shape.n_embd, "output.weight": shape.n_embd, "blk.0.ffn_down.weight": shape.n_ff}
    for name, row in rows.items():
        kind = tensor_type(shape, quant, name, row) if quant.upper() in (*RANDOM_TYPES, *_MIXES) else quant
        if kind not in types:
            raise UsageError(
                f"Random weights of type {kind} are not supported.", f"Choose one of {', '.join((*types, *_MIXES))}."
            )


def write_model(
    path: Path,
    shape: str | Shape,
    quant: str = "Q8_0",
    *,
    layers: int | None = None,
    seed: int = 0,
    vocab: Vocab = "bytes",
    template: str | None = CHATML,
    cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """Write a model of random weights. The same arguments give the same bytes.

    Its text is noise; its speed is that of a real model of this shape. `quant` is a type for all matrices or one of
    the mixes Q4_K_M, Q4_K_S, Q5_K_M, Q5_K_S. `cancelled` is asked every few MB. Returns `path`.

    Raises:
        UsageError: unknown shape or quantization.
        OSError: the disk is full or the folder cannot be written.
        Interrupted: cancelled; nothing is left at `path`.
    """
    shape = shape_of(shape, layers)
    check(shape, quant, RANDOM_TYPES)
    tensors = [_cancellable(tensor, cancelled) for tensor in _tensors(shape, quant, seed)]
    name = f"synthetic {shape.name} {quant.upper()}"
    return write_gguf(path, metadata(shape, quant, name, vocab, template), tensors)


def _cancellable(tensor: TensorSource, cancelled: Callable[[], bool]) -> TensorSource:
    def chunks() -> Chunks:
        for chunk in tensor.chunks():
            if cancelled():
                raise Interrupted("Writing cancelled.")
            yield chunk

    return msgspec.structs.replace(tensor, chunks=chunks)


def header_of(shape: str | Shape, quant: str = "Q8_0", *, layers: int | None = None) -> GGUFHeader:
    """Return the header of the file that `write_model` would write, without a tokenizer.

    Raises:
        UsageError: unknown shape or quantization.
    """
    shape = shape_of(shape, layers)
    check(shape, quant, RANDOM_TYPES)
    name = f"synthetic {shape.name} {quant.upper()}"
    tensors = [TensorInfo(one.name, one.shape, one.type, 0, one.nbytes) for one in _tensors(shape, quant, 0)]
    size = sum(one.nbytes for one in tensors)
    return GGUFHeader(3, shape_metadata(shape, quant, name), tensors, 0, size, ALIGNMENT, Path(f"{name}.gguf"))


def _tensors(shape: Shape, quant: str, seed: int) -> list[TensorSource]:
    embedding = tensor_type(shape, quant, "token_embd.weight", shape.n_embd)
    size = (shape.n_embd, shape.n_vocab)
    tensors = [random_tensor("token_embd.weight", size, embedding, seed, STD)]
    tensors.append(from_array("output_norm.weight", np.ones(shape.n_embd, np.float32)))
    if not shape.tied:
        kind = tensor_type(shape, quant, "output.weight", shape.n_embd)
        tensors.append(random_tensor("output.weight", size, kind, seed, STD))
    return [*tensors, *layer_tensors(shape, quant, seed)]
