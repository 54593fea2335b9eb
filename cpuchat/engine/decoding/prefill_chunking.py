"""Chooses how many prompt tokens to evaluate per batch, so that cancelling takes effect within 50 ms.

llama.cpp checks the abort flag between the nodes of its graph. One node over a large batch, above all the attention of
one layer over a long context, can take much longer. The size depends on the model, the thread count and the position
only, never on measured time: the same prompt is always split the same way, and gives the same logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.model import Model

_NODE_SECONDS: Final = 0.05
_TILE: Final = 64
"""Sizes are multiples of this, and at least this: for fewer tokens flash attention takes another way (GGML_FA_TILE_Q in
ggml-cpu/common.h), which takes 2.3 times as long for each (0.5B shape behind 4,000 tokens, Zen 3)."""

# Operations per second of one core, on the low side of what was measured (Zen 4, 1.5B shape: 160e9 with quantized
# weights, 120e9 with float ones, 30e9 in attention without tiles), with and without AVX-512.
_QUANTIZED_RATE: Final = {True: 150e9, False: 75e9}
_FLOAT_RATE: Final = {True: 100e9, False: 50e9}
_FLOATS: Final = ("F32", "F16", "BF16")
_ATTENTION_RATE: Final = {True: 40e9, False: 20e9}


@dataclass(frozen=True)
class PrefillChunking:
    """Work of the largest nodes of a graph.

    Attributes:
        matmul: operations per token of the largest weight matrix.
        attention: operations per token and token of context of one layer.
        wide_vectors: the CPU has AVX-512.
        is_float: that matrix is not quantized.
    """

    matmul: float
    attention: float
    n_threads: int
    wide_vectors: bool
    is_float: bool = False

    @classmethod
    def of(cls, model: Model) -> PrefillChunking:
        """Return the sizes for a loaded model. The output layer does not count: it works on the last token only."""
        header, features = model.header, bindings.engine_info().features
        experts = max(header.number("expert_count"), 1)
        used = header.number("expert_used_count") or experts
        largest, is_float = 0.0, False
        for tensor in header.tensors:
            if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
                share = used / experts if len(tensor.shape) == 3 else 1.0
                if tensor.n_elements * share > largest:
                    largest, is_float = tensor.n_elements * share, tensor.type in _FLOATS
        attention = 2.0 * header.n_head * (header.key_length + header.value_length)
        return cls(2 * largest, attention, model.pool.n_threads, "AVX512" in features, is_float)

    def size(self, n_past: int, left: int, n_ubatch: int) -> int:
        """Return the tokens for one batch after `n_past`, of `left` that follow: at most `n_ubatch`."""
        tokens = float(n_ubatch)
        if self.matmul:
            rates = _FLOAT_RATE if self.is_float else _QUANTIZED_RATE
            rate = rates[self.wide_vectors] * self.n_threads
            tokens = min(tokens, _NODE_SECONDS * rate / self.matmul)
        if self.attention:
            # tokens * (n_past + tokens) = most_pairs
            rate = _ATTENTION_RATE[self.wide_vectors] * self.n_threads
            most_pairs = _NODE_SECONDS * rate / self.attention
            tokens = min(tokens, (math.sqrt(n_past**2 + 4 * most_pairs) - n_past) / 2)
        size = min(max(int(tokens) // _TILE * _TILE, _TILE), n_ubatch)
        if size < left < size + _TILE:  # what would be left is less than a tile
            return left if left <= n_ubatch else size - _TILE if size > _TILE else size
        return min(size, left)
