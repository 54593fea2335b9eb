"""Target and draft models with a known acceptance rate.

Both are real transformers of full size, but their layers are nearly no-ops and their heads map the embedding of
the last token to the next one: what follows token t is a fixed function of t. All words form one cycle in the
target; the draft agrees on an exactly known share of them. So with greedy decoding every drafted token is accepted
with probability alpha, independent of its position: ground truth for speculation.

Embeddings are vectors of random signs: any two are almost orthogonal, and they survive every quantization. Logits:
sqrt(n_embd) for the right token, about N(0, 1) for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cpuchat.models.gguf.parse import BY_NAME
from cpuchat.models.synthetic.model import (
    CHUNK_VALUES,
    FIRST_WORD,
    K4_ONES,
    Bytes,
    Shape,
    TensorSource,
    float_bytes,
    from_array,
    generator,
    half,
    layer_tensors,
    metadata,
    tensor_type,
    write_gguf,
)
from tests.support.shapes import shape_of

Tokens = np.ndarray[Any, np.dtype[np.int64]]


def next_token_table(n_vocab: int, seed: int = 0) -> Tokens:
    """Return the target's next token for each token: (n_vocab,) token ids. Words form a single cycle in random order;
    specials and bytes lead into it at a random word."""
    rng = generator(seed, "cycle")
    order = rng.permutation(np.arange(FIRST_WORD, n_vocab))
    table = np.empty(n_vocab, np.int64)
    table[order] = np.roll(order, -1)
    table[:FIRST_WORD] = rng.choice(order, FIRST_WORD)
    return table


def draft_token_table(n_vocab: int, alpha: float, seed: int = 0) -> Tokens:
    """Return the draft's next token for each token; it agrees with the target on the share `alpha` of the words. The
    others swap their successors in a ring, so that every word still follows exactly one other."""
    table = next_token_table(n_vocab, seed)
    inverse, words = inverse_of(table), np.arange(FIRST_WORD, n_vocab)
    count = round((1 - alpha) * len(words))
    if count == 1:
        count = 2  # one alone has no partner to swap with
    wrong = generator(seed, "disagreement").permutation(words)[:count]
    table[wrong] = np.roll(table[wrong], 1)
    # Specials and bytes share the embedding of the word that has the same successor in the target.
    table[:FIRST_WORD] = table[inverse[table[:FIRST_WORD]]]
    return table


def inverse_of(table: Tokens) -> Tokens:
    """Return the word that leads to each token; -1: none does."""
    words = np.arange(FIRST_WORD, len(table))
    inverse = np.full(len(table), -1, np.int64)
    inverse[table[words]] = words
    return inverse


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
) -> None:
    """Write a target and a draft (none if `draft_path` is None) with acceptance rate `alpha`, both with a vocabulary of
    the target's size, or `n_vocab`: the target says `next_token_table(n_vocab, seed)`. Quantizations: F32, F16, BF16,
    and those whose tables are of the types in `_SIGNS`. Embeddings have 256 values or more."""
    target_shape = shape_of(target, layers)
    n_vocab = n_vocab or target_shape.n_vocab
    table = next_token_table(n_vocab, seed)
    aliases = np.arange(n_vocab)
    aliases[:FIRST_WORD] = inverse_of(table)[table[:FIRST_WORD]]
    _write(target_path, target_shape, quant, table, aliases, seed)
    if draft_path is not None:
        drafted = draft_token_table(n_vocab, alpha, seed)
        draft_shape = shape_of(draft, draft_layers)
        _write(draft_path, draft_shape, draft_quant or quant, drafted, aliases, seed + 1)


def _write(path: Path, shape: Shape, quant: str, table: Tokens, aliases: Tokens, seed: int) -> None:
    # The head is a matrix of its own; the table is still streamed only once per token.
    shape = msgspec.structs.replace(shape, tied=False, n_vocab=len(table))
    # Rows of tokens that nothing leads to get codes of their own, which no embedding matches.
    counts = {"codes": shape.n_vocab, "unused": FIRST_WORD}
    codes = np.concatenate(
        [generator(seed, name).integers(0, 256, (n, shape.n_embd // 8), dtype=np.uint8) for name, n in counts.items()]
    )
    head_rows = inverse_of(table)
    unused = np.flatnonzero(head_rows < 0)
    head_rows[unused] = shape.n_vocab + np.arange(len(unused))

    def std(name: str, row: int) -> float:
        # Outputs of order 1 inside a layer, of order 0.01 where it adds to the stream.
        return (0.01 if name in ("attn_output", "ffn_down", "ffn_down_exps") else 1.0) / row**0.5

    tensors = [
        sign_tensor("token_embd.weight", shape, quant, codes, aliases, 1.0),
        from_array("output_norm.weight", np.ones(shape.n_embd, np.float32)),
        sign_tensor("output.weight", shape, quant, codes, head_rows, shape.n_embd**-0.5),
        *layer_tensors(shape, quant, seed, std),
    ]
    name = f"synthetic {shape.name} {quant.upper()} cycle"
    write_gguf(path, metadata(shape, quant, name), tensors)


def sign_tensor(name: str, shape: Shape, quant: str, codes: Bytes, rows: Tokens, size: float) -> TensorSource:
    """Return the matrix whose row i has the signs of `codes[rows[i]]`, each +`size` or -`size` (`sign_rows`)."""
    kind = tensor_type(shape, quant, name, shape.n_embd)
    step = max(CHUNK_VALUES // shape.n_embd, 1)

    def chunks() -> Iterator[Bytes]:
        for start in range(0, len(rows), step):
            yield sign_rows(kind, codes[rows[start : start + step]], size)

    return TensorSource(name, (shape.n_embd, len(rows)), kind, chunks)


def sign_rows(kind: str, codes: Bytes, size: float) -> Bytes:
    """Return rows of weights that are +`size` where the bit of `codes` is 1 and -`size` where it is 0, as bytes.
    `codes`: (rows, row length / 8), the first value in the lowest bit."""
    bits = np.unpackbits(codes, axis=1, bitorder="little")
    if BY_NAME[kind].block == 1:
        return float_bytes(kind, np.array([-size, size], np.float32))[bits].reshape(-1).view(np.uint8)
    return np.ascontiguousarray(_SIGNS[kind](bits.reshape(-1, BY_NAME[kind].block), size)).reshape(-1)


def _nibbles(bits: Bytes, low: int, high: int) -> Bytes:
    """Return pairs of 4-bit quants, `low` where the bit is 0: byte i of a group holds value i and value i + half."""
    middle = bits.shape[-1] // 2
    first = np.where(bits[..., :middle], high, low).astype(np.uint8)
    return first | np.where(bits[..., middle:], high << 4, low << 4).astype(np.uint8)


def _with_header(header: bytes, body: Bytes) -> Bytes:
    head = np.broadcast_to(np.frombuffer(header, np.uint8), (len(body), len(header)))
    return np.concatenate([head, body.reshape(len(body), -1)], axis=1)


def _sign_q8_0(bits: Bytes, size: float) -> Bytes:
    return _with_header(half(size / 127), np.where(bits, 127, -127).astype(np.int8).view(np.uint8))


def _sign_q5_0(bits: Bytes, size: float) -> Bytes:
    # 5-bit 1 and 31 (less 16): the low nibble is 1 or 15, the fifth bit is the sign bit itself.
    fifth = np.packbits(bits, axis=1, bitorder="little")
    return _with_header(half(size / 15), np.concatenate([fifth, _nibbles(bits, 1, 15)], axis=1))


def _sign_q4_k(bits: Bytes, size: float) -> Bytes:
    return _with_header(half(2 * size / 15) + half(size) + K4_ONES, _nibbles(bits.reshape(-1, 4, 64), 0, 15))


def _sign_q6_k(bits: Bytes, size: float) -> Bytes:
    # 6-bit 1 and 63 (less 32). Per half block of 128: 64 bytes of low nibbles (values i and i + 64), 32 bytes of
    # high pairs (values i, i + 32, i + 64, i + 96 from the lowest bits up).
    halves = bits.reshape(-1, 2, 128)
    low = _nibbles(halves, 1, 15).reshape(-1, 128)
    pairs = np.where(halves.reshape(-1, 2, 4, 32), 3, 0).astype(np.uint8)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = np.bitwise_or.reduce(pairs << shifts, axis=2).reshape(-1, 64)
    tail = np.broadcast_to(np.frombuffer(b"\x01" * 16 + half(size / 31), np.uint8), (len(bits), 18))
    return np.concatenate([low, high, tail], axis=1)


_SIGNS: dict[str, Callable[[Bytes, float], Bytes]] = {
    "Q8_0": _sign_q8_0,
    "Q5_0": _sign_q5_0,
    "Q4_K": _sign_q4_k,
    "Q6_K": _sign_q6_k,
}
