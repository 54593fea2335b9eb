"""Shapes of synthetic models that are written and loaded in milliseconds."""

from __future__ import annotations

import msgspec

from cpuchat.models.synthetic.model import SHAPES, Shape

TINY_LLAMA = Shape(
    name="tiny-llama", architecture="llama", n_layer=2, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_vocab=1000
)
TINY_MOE = Shape(
    name="tiny-moe", architecture="qwen3moe", n_layer=2, n_embd=256, n_head=4, n_head_kv=2, head=64, n_ff=256,
    n_vocab=1000, n_expert=8, n_expert_used=2,
)  # fmt: skip


def shape_of(shape: str | Shape, layers: int | None = None) -> Shape:
    """Return the shape of that name, with another number of layers if given."""
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    return shape if layers is None else msgspec.structs.replace(shape, n_layer=layers)


def word(index: int) -> str:
    """Return the text of token FIRST_WORD + `index`: a space and nothing, a, b, ... z, aa, ab, ..."""
    letters = ""
    while index:
        index, letter = divmod(index - 1, 26)
        letters = chr(ord("a") + letter) + letters
    return " " + letters
