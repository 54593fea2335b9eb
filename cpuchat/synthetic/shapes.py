"""Shapes of real models, and the tensor types of a quantization."""

from __future__ import annotations

from typing import Literal

import msgspec

from cpuchat.errors import UsageError
from cpuchat.models.gguf.types import BY_NAME, FILE_TYPE_BY_NAME

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


# From the published configurations of Qwen2.5, Llama 3, Qwen3 and Gemma 3; "tiny" and "0.05b" are our own.
_ALL = (
    Shape(name="tiny", architecture="qwen2", n_layer=2, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_vocab=2048),
    Shape(name="0.05b", architecture="qwen2", n_layer=6, n_embd=512, n_head=8, n_head_kv=2, n_ff=1536, n_vocab=32768),
    Shape(name="0.5b", architecture="qwen2", n_layer=24, n_embd=896, n_head=14, n_head_kv=2, n_ff=4864,
          n_vocab=151936, tied=True),
    Shape(name="1.5b", architecture="qwen2", n_layer=28, n_embd=1536, n_head=12, n_head_kv=2, n_ff=8960,
          n_vocab=151936, tied=True),
    Shape(name="3b", architecture="qwen2", n_layer=36, n_embd=2048, n_head=16, n_head_kv=2, n_ff=11008,
          n_vocab=151936, tied=True),
    Shape(name="7b", architecture="qwen2", n_layer=28, n_embd=3584, n_head=28, n_head_kv=4, n_ff=18944,
          n_vocab=152064),
    Shape(name="8b", architecture="llama", n_layer=32, n_embd=4096, n_head=32, n_head_kv=8, n_ff=14336,
          n_vocab=128256, rope_base=5e5, n_ctx=131072),
    Shape(name="14b", architecture="qwen2", n_layer=48, n_embd=5120, n_head=40, n_head_kv=8, n_ff=13824,
          n_vocab=152064),
    Shape(name="32b", architecture="qwen2", n_layer=64, n_embd=5120, n_head=40, n_head_kv=8, n_ff=27648,
          n_vocab=152064),
    Shape(name="70b", architecture="llama", n_layer=80, n_embd=8192, n_head=64, n_head_kv=8, n_ff=28672,
          n_vocab=128256, rope_base=5e5, n_ctx=131072),
    Shape(name="30b-a3b", architecture="qwen3moe", n_layer=48, n_embd=2048, n_head=32, n_head_kv=4, n_ff=768,
          n_vocab=151936, head=128, n_expert=128, n_expert_used=8, n_ctx=40960),
    Shape(name="27b-gemma3", architecture="gemma3", n_layer=62, n_embd=5376, n_head=32, n_head_kv=16, n_ff=21504,
          n_vocab=262144, tied=True, head=128, window=1024, n_ctx=131072),
)  # fmt: skip
SHAPES: dict[str, Shape] = {shape.name: shape for shape in _ALL}

# Mixes of llama-quantize: file type -> type of most tensors. Other names are a type for everything.
_MIXES = {"Q4_K_M": "Q4_K", "Q4_K_S": "Q4_K", "Q5_K_M": "Q5_K", "Q5_K_S": "Q5_K"}
# What llama-quantize takes when rows are no multiple of 256 (tensor_type_fallback in llama-quant.cpp).
_FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}


def shape_of(shape: str | Shape, layers: int | None = None) -> Shape:
    """Return the shape of that name, with another number of layers if given.

    Raises:
        UsageError: no such name, or no layers.
    """
    if isinstance(shape, str):
        found = SHAPES.get(shape.lower())
        if found is None:
            raise UsageError(f"Unknown shape {shape!r}.", f"Choose one of {', '.join(SHAPES)}.")
        shape = found
    if layers is not None:
        if layers < 1:
            raise UsageError(f"Invalid number of layers: {layers}.", "Use at least 1.")
        shape = msgspec.structs.replace(shape, n_layer=layers)
    return shape


def file_type(quant: str) -> int:
    """Return `general.file_type` of a quantization, by its usual name in any case.

    Raises:
        UsageError: an unknown name.
    """
    name = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S"}.get(quant.upper(), quant.upper())
    if name not in FILE_TYPE_BY_NAME:
        raise UsageError(f"Unknown quantization {quant!r}.", "Examples: F16, Q8_0, Q4_K_M.")
    return FILE_TYPE_BY_NAME[name]


def uses_more_bits(layer: int, n_layer: int) -> bool:
    """Return whether a layer's attn_v and ffn_down get Q6_K in the "M" mixes (use_more_bits in llama-quant.cpp)."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def tensor_type(shape: Shape, quant: str, name: str, row: int) -> str:
    """Return the type of the matrix `name` with rows of `row` values in a file of quantization `quant`.

    Follows llama-quantize for the K mixes, without an importance matrix. `row` decides the fallback for sizes that
    blocks of 256 don't divide.
    """
    quant = quant.upper()
    kind = _MIXES.get(quant, quant)
    if kind == "MXFP4" and "_exps" not in name:
        kind = "Q8_0"
    is_head = name == "output.weight" or (name == "token_embd.weight" and shape.tied)
    if is_head and BY_NAME[kind].block > 1:
        kind = "Q8_0" if kind == "Q8_0" or row % BY_NAME[kind].block else "Q6_K"
    elif quant in _MIXES and name.startswith("blk."):
        kind = _mixed(shape, quant, kind, name)
    if row % BY_NAME[kind].block:
        kind = _FALLBACK.get(kind, "F16")
    return "F16" if row % BY_NAME[kind].block else kind


def _mixed(shape: Shape, quant: str, kind: str, name: str) -> str:
    layer = int(name.split(".")[1])
    is_v, is_down = ".attn_v." in name, ".ffn_down" in name
    if quant.endswith("_M") and (is_v or is_down) and uses_more_bits(layer, shape.n_layer):
        return "Q6_K"
    if quant == "Q4_K_S" and ((is_v and layer < 4) or (is_down and layer < shape.n_layer // 8)):
        return "Q5_K"
    if is_v and kind == "Q4_K" and shape.architecture == "llama" and shape.n_layer == 80:
        return "Q5_K"
    return kind
