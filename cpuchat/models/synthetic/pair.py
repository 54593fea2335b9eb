"""Target and draft models with a known acceptance rate.

Both are real transformers of full size, but their layers are nearly no-ops and their heads map the embedding of
the last token to the next one: what follows token t is a fixed function of t. All words form one cycle in the
target; the draft agrees on an exactly known share of them. So with greedy decoding every drafted token is accepted
with probability alpha, independent of its position: ground truth for speculation.

Embeddings are vectors of random signs: any two are almost orthogonal, and they survive every quantization. Logits:
sqrt(n_embd) for the right token, about N(0, 1) for all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cpuchat.base.errors import UsageError
from cpuchat.models.synthetic.model import (
    CHATML,
    CHUNK_VALUES,
    FIRST_WORD,
    SIGN_TYPES,
    Bytes,
    Shape,
    TensorSource,
    Vocab,
    check,
    from_array,
    generator,
    layer_tensors,
    metadata,
    shape_of,
    sign_rows,
    tensor_type,
    write_gguf,
)

Tokens = np.ndarray[Any, np.dtype[np.int64]]

MIN_EMBEDDING = 256


def _words(n_vocab: int) -> Tokens:
    return np.arange(FIRST_WORD, n_vocab)


def next_token_table(n_vocab: int, seed: int = 0) -> Tokens:
    """Return the target's next token for each token: (n_vocab,) token ids.

    Words form a single cycle in random order. Specials and bytes lead into it at a random word.
    """
    rng = generator(seed, "cycle")
    order = rng.permutation(_words(n_vocab))
    table = np.empty(n_vocab, np.int64)
    table[order] = np.roll(order, -1)
    table[:FIRST_WORD] = rng.choice(order, FIRST_WORD)
    return table


def draft_token_table(n_vocab: int, alpha: float, seed: int = 0) -> Tokens:
    """Return the draft's next token for each token; it agrees with the target on the share `alpha` of the words.

    The others swap their successors in a ring, so that every word still follows exactly one other.
    """
    table = next_token_table(n_vocab, seed)
    words = _words(n_vocab)
    count = round((1 - alpha) * len(words))
    if count == 1:
        count = 2  # one alone has no partner to swap with
    wrong = generator(seed, "disagreement").permutation(words)[:count]
    table[wrong] = np.roll(table[wrong], 1)
    outside = np.arange(FIRST_WORD)
    inverse = _inverse(next_token_table(n_vocab, seed))
    # Specials and bytes share the embedding of the word that has the same successor in the target.
    table[outside] = table[inverse[table[outside]]]
    return table


def _inverse(table: Tokens) -> Tokens:
    words = _words(len(table))
    inverse = np.full(len(table), -1, np.int64)
    inverse[table[words]] = words
    return inverse


def _codes(shape: Shape, seed: int, name: str, count: int) -> Bytes:
    return generator(seed, name).integers(0, 256, (count, shape.n_embd // 8), dtype=np.uint8)


def _signs(name: str, shape: Shape, quant: str, codes: Bytes, rows: Tokens, size: float) -> TensorSource:
    kind = tensor_type(shape, quant, name, shape.n_embd)
    step = max(CHUNK_VALUES // shape.n_embd, 1)

    def chunks() -> Iterator[Bytes]:
        for start in range(0, len(rows), step):
            yield sign_rows(kind, codes[rows[start : start + step]], size)

    return TensorSource(name, (shape.n_embd, len(rows)), kind, chunks)


def _check(shape: Shape, quant: str) -> None:
    check(shape, quant, SIGN_TYPES)
    if shape.n_embd < MIN_EMBEDDING or shape.n_embd % 32:
        raise UsageError(
            f"An embedding size of {shape.n_embd} is not supported for a pair.",
            f"Use a multiple of 32, at least {MIN_EMBEDDING}.",
        )


def _write(path: Path, shape: Shape, quant: str, table: Tokens, aliases: Tokens, seed: int, vocab: Vocab) -> None:
    # The head is a matrix of its own; the table is still streamed only once per token.
    shape = msgspec.structs.replace(shape, tied=False)
    codes = _codes(shape, seed, "codes", shape.n_vocab)
    # Rows of tokens that nothing leads to get codes of their own, which no embedding matches.
    codes = np.concatenate([codes, _codes(shape, seed, "unused", FIRST_WORD)])
    head_rows = _inverse(table)
    unused = np.flatnonzero(head_rows < 0)
    head_rows[unused] = shape.n_vocab + np.arange(len(unused))

    def std(name: str, row: int) -> float:
        # Outputs of order 1 inside a layer, of order 0.01 where it adds to the stream.
        return (0.01 if name in ("attn_output", "ffn_down", "ffn_down_exps") else 1.0) / row**0.5

    tensors = [
        _signs("token_embd.weight", shape, quant, codes, aliases, 1.0),
        from_array("output_norm.weight", np.ones(shape.n_embd, np.float32)),
        _signs("output.weight", shape, quant, codes, head_rows, shape.n_embd**-0.5),
        *layer_tensors(shape, quant, seed, std),
    ]
    name = f"synthetic {shape.name} {quant.upper()} cycle"
    write_gguf(path, metadata(shape, quant, name, vocab, CHATML), tensors)


def write_pair(
    target_path: Path,
    draft_path: Path | None,
    alpha: float,
    *,
    target: str | Shape = "1.5b",
    draft: str | Shape = "0.05b",
    quant: str = "Q8_0",
    draft_quant: str | None = None,
    layers: int | None = None,
    draft_layers: int | None = None,
    n_vocab: int | None = None,
    seed: int = 0,
    vocab: Vocab = "bytes",
) -> None:
    """Write a target and a draft (none if `draft_path` is None) with acceptance rate `alpha`.

    Both get the target's vocabulary size, or `n_vocab`. `next_token_table(n_vocab, seed)` is what the target
    will say. Quantizations: those whose tensors are all in `blocks.SIGN_TYPES` (F16, Q8_0, Q4_0, Q4_K_M, ...).

    Raises:
        UsageError: alpha outside 0..1, unknown shape or quantization, embedding below 256.
    """
    if not 0 <= alpha <= 1:
        raise UsageError(f"Invalid acceptance rate: {alpha:g}.", "Use 0 to 1.")
    target_shape = shape_of(target, layers)
    if n_vocab:
        target_shape = msgspec.structs.replace(target_shape, n_vocab=n_vocab)
    n_vocab = target_shape.n_vocab
    draft_shape = msgspec.structs.replace(shape_of(draft, draft_layers), n_vocab=n_vocab)
    _check(target_shape, quant)
    if draft_path is not None:
        _check(draft_shape, draft_quant or quant)
    table = next_token_table(n_vocab, seed)
    aliases = np.arange(n_vocab)
    aliases[:FIRST_WORD] = _inverse(table)[table[:FIRST_WORD]]
    _write(target_path, target_shape, quant, table, aliases, seed, vocab)
    if draft_path is not None:
        drafted = draft_token_table(n_vocab, alpha, seed)
        _write(draft_path, draft_shape, draft_quant or quant, drafted, aliases, seed + 1, vocab)
