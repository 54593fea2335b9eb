"""Computes the work of a pass: bytes to read and multiply-adds, by tensor type."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

COST_MODEL = 2
"""Raise it with every change of the work of a pass or of how profiles are fitted: what earlier versions kept of models
and of this machine is then computed and measured again."""


class Weights(msgspec.Struct, frozen=True):
    """The matrices of one tensor `type`: `nbytes` together, and one multiply-add per value and token.

    `activations`: the values that they take in and give out for each token, their rows and columns.
    """

    type: str
    nbytes: float
    madds: float
    activations: float = 0.0


class Attention(msgspec.Struct, frozen=True):
    """Layers that attend alike. Per token of the context: `nbytes` of KV cache, and `madds` multiply-adds for each
    token of the pass.

    `window`: only over the last tokens (0: all); `step`: in steps of so many tokens (1 with flash attention).
    """

    nbytes: float
    madds: float
    window: int = 0
    step: int = 1

    def cells(self, n_tokens: float, n_past: float) -> float:
        """Return the tokens of the context that a pass over `n_tokens` tokens reads."""
        cells = n_past + n_tokens
        if self.window:
            cells = min(cells, self.window + n_tokens - 1)
        return -(-cells // self.step) * self.step if self.step > 1 else cells


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a model.

    `dense` and `head` (the output matrix, only for tokens whose logits are wanted) are read whole by every pass;
    of the `experts`, all routed ones together, a token uses `n_expert_used` of `n_expert`. `row`: bytes of tables that
    each token looks up; `state`: bytes of recurrent state, read and written by each pass. `alike`: share of the tokens
    of one text that choose the same experts as others of the pass, as it were; 0 with random weights.
    """

    name: str = ""
    n_layer: int
    dense: tuple[Weights, ...]
    head: tuple[Weights, ...] = ()
    experts: tuple[Weights, ...] = ()
    n_expert: int = 0
    n_expert_used: int = 0
    alike: float = 0.0
    row: int = 0
    state: int = 0
    attention: tuple[Attention, ...] = ()

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of weights that passes read, all experts included."""
        return sum(one.nbytes for one in (*self.dense, *self.head, *self.experts))

    @property
    def is_moe(self) -> bool:
        return self.n_expert > 0

    @property
    def width(self) -> int:
        """Return the values of a hidden state: the smaller side of the output matrix; 0 where that is not known."""
        area = sum(one.madds for one in self.head)
        sides = sum(one.activations for one in self.head)
        return round((sides - math.sqrt(max(sides * sides - 4 * area, 0.0))) / 2)


class Part(NamedTuple):
    """A part of a pass: matrices of one `type` that `batch` tokens are multiplied with at once."""

    type: str
    nbytes: float
    madds: float
    batch: float


KV = "KV"
"""The type of attention over the KV cache among the arithmetic rates."""
ROUTED = " routed"
"""Follows the type of experts among the arithmetic rates: few tokens are multiplied with each of many matrices."""
_LAST = 0.85
"""Share of the last layer that is computed only for the tokens whose logits are wanted: all behind K and V."""
ACTIVATIONS = "activations"
"""The type of what is done to values between matrices (quantizing, norms, gates): much where matrices are small."""
ALIKE = 0.5
"""`ModelWork.alike` of text: DeepSeek-R1 takes 1.21, 1.66, 2.65 and 4.46 times as long for 2, 4, 8 and 16 tokens as for
one (llama.cpp pull request 17034); with independent choices it would read 1.55, 2.6, 4.5 and 7.7 times as much.
"""


def experts_read(
    n_expert: int, n_expert_used: int, n_tokens: float, *, sequences: int = 1, alike: float = 0.0
) -> float:
    """Return the expected number of distinct experts that `n_tokens` tokens use, when each chooses `n_expert_used` of
    `n_expert`.

    Texts choose independently of each other; of the further tokens of one text the share `alike` chooses as the others
    do.
    """
    if n_expert <= 0:
        return 0.0
    choosing = sequences * (1 + (n_tokens / sequences - 1) * (1 - alike))
    return n_expert * (1 - (1 - min(n_expert_used / n_expert, 1.0)) ** choosing)


def parts(
    work: ModelWork, n_tokens: float, n_past: float = 0, *, n_outputs: float | None = None, sequences: int = 1
) -> list[Part]:
    """Return the parts of a pass.

    Args:
        n_tokens: evaluated together, of all sequences.
        n_past: tokens in the context of each sequence.
        n_outputs: tokens whose logits are wanted (default: all).
        sequences: chats that the tokens belong to in equal parts; each has a KV cache of its own.
    """
    outputs = n_tokens if n_outputs is None else n_outputs
    # Tokens that pass through all layers, as it were; files without layers exist.
    whole = n_tokens - (n_tokens - outputs) * _LAST / max(work.n_layer, 1)
    found = [Part(one.type, one.nbytes, one.madds * whole, n_tokens) for one in work.dense]
    if outputs:
        found += [Part(one.type, one.nbytes, one.madds * outputs, outputs) for one in work.head]
    between = whole * sum(one.activations for one in work.dense)
    between += outputs * sum(one.activations for one in work.head)
    if work.is_moe:
        read = experts_read(work.n_expert, work.n_expert_used, n_tokens, sequences=sequences, alike=work.alike)
        used = whole * work.n_expert_used
        batch = max(n_tokens * work.n_expert_used / max(read, 1e-9), 1.0)
        found += [
            Part(one.type + ROUTED, one.nbytes * read / work.n_expert, one.madds * used / work.n_expert, batch)
            for one in work.experts
        ]
        between += used / work.n_expert * sum(one.activations for one in work.experts)
    if between:
        found.append(Part(ACTIVATIONS, 0.0, between, n_tokens))
    each = n_tokens / sequences
    for one in work.attention:
        cells = one.cells(each, n_past)
        seen = cells - (each - 1) / 2
        seen = min(seen, one.window) if one.window else seen
        found.append(Part(KV, sequences * cells * one.nbytes, n_tokens * seen * one.madds, each))
    moved = n_tokens * work.row + 2.0 * sequences * work.state
    if moved:
        found.append(Part(KV, moved, 0.0, 1.0))
    return found


def bytes_read(work: ModelWork, n_tokens: float, n_past: float = 0, *, sequences: int = 1) -> float:
    """Return the bytes that a pass reads."""
    return sum(part.nbytes for part in parts(work, n_tokens, n_past, sequences=sequences))


def by_type(matrices: Iterable[Weights]) -> tuple[Weights, ...]:
    """Add up matrices by type, in the order of their first appearance."""
    totals: dict[str, Weights] = {}
    for one in matrices:
        known = totals.get(one.type, Weights(one.type, 0.0, 0.0))
        totals[one.type] = Weights(
            one.type, known.nbytes + one.nbytes, known.madds + one.madds, known.activations + one.activations
        )
    return tuple(totals.values())
