"""Writes models of random weights in the shapes of real ones, directly in GGML's formats: gigabytes take seconds.

Every block gets constant scales and random quants, spread like N(0, std), uniform for the quantised types; block
layouts are those of ggml-common.h, scale packing that of ggml-quants.c. Files are GGUF version 3; their tensors come in
chunks, so that memory stays small.

The vocabulary tokenizes and detokenizes any text losslessly: 0 `<unk>`, 1 `<s>`, 2 `</s>`, 3 `<|im_start|>`, 4
`<|im_end|>`, 5..260 the bytes, then words: a lone space, ` a` ... ` z`, ` aa` ... Every beginning of a word is a word,
so SentencePiece merging finds exactly the token that was written.
"""

from __future__ import annotations

import itertools
import math
import string
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, cast

import msgspec
import numpy as np

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import Interrupted, UsageError
from cpuchat.base.files import atomic_writer
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.parse import ALIGNMENT, BY_NAME, FILE_TYPE_BY_NAME, TensorInfo

Architecture = Literal["qwen2", "llama", "qwen3moe", "gemma3"]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model, with the names that GGUF uses. `head` 0 means n_embd / n_head; `tied`: the embedding is the
    head, too. `n_ff` of a mixture of experts is that of one expert. `window`: tokens that five of six layers of Gemma 3
    attend to."""

    name: str
    architecture: Architecture
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_ff: int
    n_vocab: int
    tied: bool = False
    head: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    window: int = 0
    rope_base: float = 1e6
    n_ctx: int = 32768

    @property
    def head_size(self) -> int:
        return self.head or self.n_embd // self.n_head


_ROWS = Path(__file__).with_name("shapes.json").read_bytes()
SHAPES = {shape.name: shape for shape in msgspec.json.decode(_ROWS, type=prepared(list[Shape]))}
"""By name. From the published configurations of Qwen2.5, Llama 3, Qwen3 and Gemma 3; "tiny" and "0.05b" are our own."""

# Mixes of llama-quantize: file type -> type of most tensors. Other names are a type for everything.
_SHAPE_MIXES = {"Q4_K_M": "Q4_K", "Q4_K_S": "Q4_K", "Q5_K_M": "Q5_K", "Q5_K_S": "Q5_K"}
# What llama-quantize takes when rows are no multiple of 256 (tensor_type_fallback in llama-quant.cpp).
_FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}


def _file_type(quant: str) -> int:
    """Return `general.file_type` of a quantization, named in any case. Raises UsageError: an unknown name."""
    name = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S"}.get(quant.upper(), quant.upper())
    if name not in FILE_TYPE_BY_NAME:
        raise UsageError(f"Unknown quantization {quant!r}.", "Examples: F16, Q8_0, Q4_K_M.")
    return FILE_TYPE_BY_NAME[name]


def tensor_type(shape: Shape, quant: str, name: str, row: int) -> str:
    """Return the type of the matrix `name` with rows of `row` values in a file of quantization `quant`.

    Follows llama-quantize for the K mixes, without an importance matrix. `row` decides the fallback for sizes that
    blocks of 256 don't divide."""
    quant = quant.upper()
    kind = _SHAPE_MIXES.get(quant, quant)
    if kind == "MXFP4" and "_exps" not in name:
        kind = "Q8_0"
    is_head = name == "output.weight" or (name == "token_embd.weight" and shape.tied)
    if is_head and BY_NAME[kind].block > 1:
        kind = "Q8_0" if kind == "Q8_0" or row % BY_NAME[kind].block else "Q6_K"
    elif quant in _SHAPE_MIXES and name.startswith("blk."):
        layer, n_layer = int(name.split(".")[1]), shape.n_layer
        eighth, is_v, is_down = n_layer // 8, ".attn_v." in name, ".ffn_down" in name
        # use_more_bits in llama-quant.cpp
        more_bits = layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2
        if quant.endswith("_M") and (is_v or is_down) and more_bits:
            kind = "Q6_K"
        else:
            is_early = quant == "Q4_K_S" and ((is_v and layer < 4) or (is_down and layer < eighth))
            of_70b = is_v and kind == "Q4_K" and shape.architecture == "llama" and n_layer == 80
            kind = "Q5_K" if is_early or of_70b else kind
    if row % BY_NAME[kind].block:
        kind = _FALLBACK.get(kind, "F16")
    return "F16" if row % BY_NAME[kind].block else kind


Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# The 16 levels of IQ4_NL and of MXFP4 (ggml-common.h: kvalues_iq4nl, kvalues_mxfp4).
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# 6-bit scales of value 1 (Q4_K and Q5_K: scale and min; Q3_K: stored as 33, of which 32 is taken away).
K4_ONES = bytes([1] * 8 + [0x11] * 4)
_Q3_ONES = bytes([0x11] * 8 + [0xAA] * 4)


def half(value: float) -> bytes:
    return np.float16(value).tobytes()


_LEVELS: dict[str, range | tuple[int, ...]] = {
    "Q4_0": range(16), "Q4_1": range(16), "Q5_0": range(32), "Q5_1": range(32), "Q8_0": range(-127, 128),
    "Q2_K": range(4), "Q3_K": range(8), "Q4_K": range(16), "Q5_K": range(32), "Q6_K": range(64),
    "IQ4_NL": IQ4_LEVELS, "IQ4_XS": IQ4_LEVELS, "MXFP4": MXFP4_LEVELS,
}  # fmt: skip


def _scales(kind: str, std: float) -> list[tuple[int, bytes]]:
    """Return the constant fields of a block of uniform random quants with standard deviation `std`: (offset, bytes)."""
    levels = _LEVELS[kind]
    d = std / float(np.std(np.array(levels, np.float64)))
    mean = d * (len(levels) - 1) / 2  # of levels from 0 on, which a minimum makes symmetric
    match kind:
        case "Q4_1" | "Q5_1":
            return [(0, half(d) + half(-mean))]
        case "Q2_K":
            return [(0, b"\x11" * 16), (80, half(d) + half(mean))]
        case "Q3_K":
            return [(96, _Q3_ONES), (108, half(d))]
        case "Q4_K" | "Q5_K":
            return [(0, half(d) + half(mean) + K4_ONES)]
        case "Q6_K":
            return [(192, b"\x01" * 16 + half(d))]
        case "IQ4_XS":
            return [(0, half(d) + b"\xaa\xaa" + b"\x11" * 4)]
        case "MXFP4":  # the power of 2 next to `d`, less 1 as the levels are doubled (ggml-impl.h)
            return [(0, bytes([int(np.clip(round(np.log2(d)) + 128, 1, 254))]))]
        case _:
            return [(0, half(d))]


@cache
def _normal_table(kind: str, std: float) -> np.ndarray[Any, Any]:
    """Return 65,536 equally likely values of N(0, std) in the bytes of F32, F16 or BF16."""
    normal = NormalDist(0, std)
    values = np.array([normal.inv_cdf((i + 0.5) / 4096) for i in range(4096)], np.float32)
    values = np.interp(np.arange(65536) / 65535 * 4095, np.arange(4096), values).astype(np.float32)
    return float_bytes(kind, values)


def float_bytes(kind: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if kind == "F32":
        return values.astype(np.float32)
    if kind == "F16":
        return values.astype(np.float16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


RANDOM_TYPES = ("F32", "F16", "BF16", *_LEVELS)
# Levels of these types are not balanced around 0 (-8..7), which would give a network a common direction that drowns
# its input: every second block gets a negative scale. Where the sign of that scale is.
_SIGN_BYTE = {"Q4_0": 1, "Q5_0": 1, "Q3_K": 109, "Q6_K": 209, "IQ4_NL": 1, "IQ4_XS": 1}


def _raw(rng: np.random.Generator, count: int) -> Bytes:
    words = rng.integers(0, 1 << 64, -(-count // 8), dtype=np.uint64)
    return cast(Bytes, words.view(np.uint8)[:count])


def random_rows(kind: str, rng: np.random.Generator, n_values: int, std: float) -> Bytes:
    """Return `n_values` random weights of type `kind` with standard deviation `std`, as bytes."""
    layout = BY_NAME[kind]
    if layout.block == 1:
        return _normal_table(kind, std)[_raw(rng, 2 * n_values).view(np.uint16)].view(np.uint8)
    blocks = _raw(rng, n_values // layout.block * layout.nbytes).reshape(-1, layout.nbytes)
    if kind == "Q8_0":
        # -128 is not a level of Q8_0: kernels take absolute values in 8 bits.
        quants = blocks[:, 2:].view(np.int8)
        np.maximum(quants, -127, out=quants)
    for offset, field in _scales(kind, std):
        blocks[:, offset : offset + len(field)] = np.frombuffer(field, np.uint8)
    if kind in _SIGN_BYTE:
        blocks[1::2, _SIGN_BYTE[kind]] ^= 0x80
    return blocks.reshape(-1)


Chunks = Iterable["np.ndarray[Any, Any] | bytes | memoryview"]


class TensorSource(msgspec.Struct, frozen=True):
    """A tensor to write. `shape` in GGML's order (`shape[0]` contiguous); `chunks()` yields its bytes in order."""

    name: str
    shape: tuple[int, ...]
    type: str
    chunks: Callable[[], Chunks]

    @property
    def nbytes(self) -> int:
        kind = BY_NAME[self.type]
        return math.prod(self.shape) // kind.block * kind.nbytes


def from_array(name: str, values: np.ndarray[Any, Any], kind: str = "F32") -> TensorSource:
    """Return a tensor from a numpy array (last axis contiguous) of the dtype of `kind`."""
    return TensorSource(name, tuple(reversed(values.shape)), kind, lambda: (np.ascontiguousarray(values),))


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _array(values: Sequence[Any] | np.ndarray[Any, Any]) -> bytes:
    if isinstance(values, np.ndarray):
        code = {"f": (6, "<f4"), "i": (5, "<i4"), "u": (4, "<u4"), "b": (7, "?")}[values.dtype.kind]
        return struct.pack("<IIQ", 9, code[0], len(values)) + values.astype(code[1]).tobytes()
    if values and isinstance(values[0], str):
        return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(_string, values))
    return _array(np.array(values, np.int32 if all(isinstance(v, int) for v in values) else np.float32))


def _value(value: Any) -> bytes:
    # llama.cpp checks types: sizes and ids are u32, factors f32.
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        if value < 0:
            return struct.pack("<Ii", 5, value)
        return struct.pack("<II", 4, value) if value < 1 << 32 else struct.pack("<IQ", 10, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    return _array(value)


def _pad(size: int) -> int:
    return -size % ALIGNMENT


def write_gguf(
    path: Path,
    metadata: dict[str, Any],
    tensors: Sequence[TensorSource],
    cancelled: Callable[[], bool] = lambda: False,
) -> Path:
    """Write the file atomically: `path` is complete or does not exist. `cancelled` is asked for each chunk.

    Metadata values: bool, int (u32, u64 or i32 by size), float (f32), str, lists of str, int (i32) or float (f32),
    numpy arrays. Raises ValueError: a tensor's chunks don't add up to its shape; OSError: the disk is full or the
    folder cannot be written; Interrupted: cancelled."""
    head = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))]
    head += [_string(key) + _value(value) for key, value in metadata.items()]
    offset = 0
    for tensor in tensors:
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
        head.append(_string(tensor.name) + dims + struct.pack("<IQ", BY_NAME[tensor.type].id, offset))
        offset += tensor.nbytes + _pad(tensor.nbytes)
    header = b"".join(head)
    with atomic_writer(path, mode=0o644, sync=False) as file:
        file.write(header + bytes(_pad(len(header))))
        for tensor in tensors:
            written = 0
            for chunk in tensor.chunks():
                if cancelled():
                    raise Interrupted("Writing cancelled.")
                view = memoryview(chunk).cast("B")  # pyright: ignore[reportArgumentType]
                written += len(view)
                file.write(view)
            if written != tensor.nbytes:
                raise ValueError(f"tensor {tensor.name}: got {written} bytes, its shape needs {tensor.nbytes}")
            file.write(bytes(_pad(written)))
    return path


FIRST_BYTE = 5
FIRST_WORD = FIRST_BYTE + 256
END = 4

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _vocab_metadata(architecture: str, n_vocab: int) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    letters = (itertools.product(string.ascii_lowercase, repeat=length) for length in itertools.count())
    words = itertools.islice(itertools.chain.from_iterable(letters), n_vocab - FIRST_WORD)
    tokens += ["\u2581" + "".join(word) for word in words]
    # llama_token_type: 1 normal, 2 unknown, 3 control, 6 byte.
    types = np.array([2, 3, 3, 3, 3] + [6] * 256 + [1] * (n_vocab - FIRST_WORD), np.int32)
    return {
        f"{architecture}.vocab_size": n_vocab,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(n_vocab, np.float32),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": _CHATML,
    }


CHUNK_VALUES = 4 << 20
# Standard deviation of weights, as in a freshly initialised transformer.
STD = 0.02


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


def metadata(shape: Shape, quant: str, name: str) -> dict[str, Any]:
    """Return the metadata of a model."""
    return _shape_metadata(shape, quant, name) | _vocab_metadata(shape.architecture, shape.n_vocab)


def _shape_metadata(shape: Shape, quant: str, name: str) -> dict[str, Any]:
    a = shape.architecture
    values: dict[str, Any] = {
        "general.architecture": a,
        "general.name": name,
        "general.type": "model",
        "general.file_type": _file_type(quant),
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


def _checked(shape: str | Shape, quant: str) -> tuple[Shape, str]:
    """Return the shape, and the name of the model. Raises UsageError: unknown quantization, or a tensor needs a type
    that is not in `RANDOM_TYPES`."""
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    _file_type(quant)
    rows = {"token_embd.weight": shape.n_embd, "output.weight": shape.n_embd, "blk.0.ffn_down.weight": shape.n_ff}
    for name, row in rows.items():
        kind = tensor_type(shape, quant, name, row) if quant.upper() in (*RANDOM_TYPES, *_SHAPE_MIXES) else quant
        if kind not in RANDOM_TYPES:
            known = ", ".join((*RANDOM_TYPES, *_SHAPE_MIXES))
            raise UsageError(f"Random weights of type {kind} are not supported.", f"Choose one of {known}.")
    return shape, f"synthetic {shape.name} {quant.upper()}"


def write_model(
    path: Path, shape: str | Shape, quant: str = "Q8_0", *, seed: int = 0, cancelled: Callable[[], bool] = lambda: False
) -> Path:
    """Write a model of random weights, of a `shape` or that of `SHAPES`. The same arguments give the same bytes.

    Its text is noise; its speed is that of a real model of this shape. `quant` is a type for all matrices or one of the
    mixes Q4_K_M, Q4_K_S, Q5_K_M, Q5_K_S. `cancelled` is asked every few MB. Returns `path`. Raises UsageError: unknown
    quantization; OSError: the disk is full or the folder cannot be written; Interrupted: cancelled; nothing is left at
    `path`."""
    shape, name = _checked(shape, quant)
    return write_gguf(path, metadata(shape, quant, name), _tensors(shape, quant, seed), cancelled)


def header_of(shape: str | Shape, quant: str = "Q8_0") -> GGUFHeader:
    """Return the header of the file that `write_model` would write, without a tokenizer. Raises UsageError: unknown
    quantization."""
    shape, name = _checked(shape, quant)
    tensors = [TensorInfo(one.name, one.shape, one.type, 0, one.nbytes) for one in _tensors(shape, quant, 0)]
    size = sum(one.nbytes for one in tensors)
    return GGUFHeader(3, _shape_metadata(shape, quant, name), tensors, 0, size, ALIGNMENT, Path(f"{name}.gguf"))


def _tensors(shape: Shape, quant: str, seed: int) -> list[TensorSource]:
    embedding = tensor_type(shape, quant, "token_embd.weight", shape.n_embd)
    size = (shape.n_embd, shape.n_vocab)
    tensors = [random_tensor("token_embd.weight", size, embedding, seed, STD)]
    tensors.append(from_array("output_norm.weight", np.ones(shape.n_embd, np.float32)))
    if not shape.tied:
        kind = tensor_type(shape, quant, "output.weight", shape.n_embd)
        tensors.append(random_tensor("output.weight", size, kind, seed, STD))
    return [*tensors, *layer_tensors(shape, quant, seed)]
