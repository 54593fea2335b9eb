"""Computes the bytes that a pass reads from memory. Definitions: docs/figures.md."""

from __future__ import annotations

from cpuchat.costmodel.work import ALIKE, experts_read
from cpuchat.model_info import Traffic


def pass_bytes(traffic: Traffic, n_tokens: float, n_past: int, *, alike: float = ALIKE) -> float:
    """Return the bytes that one pass over `n_tokens` tokens (an average may be fractional) reads, with `n_past` tokens
    in the context.

    The recurrent state counts twice, read and written; what is added to the KV cache is too little to count. `alike` as
    of `costmodel.work.ModelWork`: 0 for random tokens.
    """
    total = traffic.weights + n_tokens * traffic.row + 2.0 * traffic.state
    if traffic.n_expert:
        read = experts_read(traffic.n_expert, traffic.n_expert_used, n_tokens, alike=alike)
        total += traffic.experts * read / traffic.n_expert
    for part in traffic.kv:
        cells = n_past + n_tokens
        if part.window:
            cells = min(cells, part.window + n_tokens - 1)
        cells = -(-cells // part.step) * part.step if part.step > 1 else cells
        total += cells * part.bytes_per_token
    return total
