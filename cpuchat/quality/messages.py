"""What the app and the measuring process (`engine.lockstep`) tell each other, in lines of JSON; and comparing rows of
logits, which runs between two passes of the models, on all of their cores, here and in `engine.scoring`.

The process ends with its input, so that it never outlives its parent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import msgspec
import numpy as np

from cpuchat.protocol.messages import Message
from cpuchat.quality.statistics import Arrays, Scores


class Text(msgspec.Struct, frozen=True, kw_only=True):
    """A text of one kind: `content`, or `dialogues`, which the base model's chat template turns into text."""

    kind: str
    content: str = ""
    dialogues: tuple[tuple[Message, ...], ...] = ()


class QualityStart(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """Compare each of `others` with `base` on `cpus`, over `texts` in windows of `n_ctx` tokens, without those that are
    `done`, for each of the others."""

    base: str
    others: tuple[str, ...]
    cpus: tuple[int, ...]
    texts: tuple[Text, ...]
    n_ctx: int
    done: tuple[tuple[int, ...], ...] = ()


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """The model `name` is being loaded; `share` (0-1) of it is."""

    name: str
    share: float


class Planned(msgspec.Struct, frozen=True, kw_only=True, tag="planned"):
    """`kinds` of the windows, in the order in which they are measured."""

    kinds: tuple[str, ...]


class Disagreement(msgspec.Struct, frozen=True, kw_only=True):
    """A position where the most probable tokens differ: the text before it, the token that follows in the text, and
    both models' choices with their probabilities (0-1)."""

    kld: float
    context: str
    token: str
    base_top: str
    base_p: float
    other_top: str
    other_p: float


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag="scored"):
    """One window of one of the others. The arrays of `statistics.Scores` are float32, little-endian; `worst` are the
    disagreements with the highest KLD, the highest first."""

    other: int
    window: int
    kld: bytes
    base_nll: bytes
    other_nll: bytes
    same_top: bytes
    worst: tuple[Disagreement, ...]


class QualityFinished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """All windows are measured."""


Answer = Loading | Planned | Scored | QualityFinished


class Tops(Arrays, frozen=True):
    """Both models' most probable token at each position (int32), and the probability that they give it (float32)."""

    base: np.ndarray
    other: np.ndarray
    base_p: np.ndarray
    other_p: np.ndarray

    @classmethod
    def empty(cls, n: int) -> Self:
        return cls(*(np.empty(n, kind) for kind in (np.int32, np.int32, np.float32, np.float32)))


Rows = Sequence[np.ndarray] | np.ndarray


class RowComparer:
    """Compares rows on a thread for each of `cpus`; numpy releases the GIL over whole rows. `close` it.

    The thread that makes it may be pinned to one CPU, which other threads would inherit."""

    def __init__(self, cpus: Sequence[int], n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self._threads = threads = len(cpus)
        pin = getattr(os, "sched_setaffinity", lambda *_: None)
        self._pool = ThreadPoolExecutor(threads, "compare", initializer=pin, initargs=(0, tuple(cpus)))
        self._scratch = [(np.empty(n_vocab, np.float32), np.empty(n_vocab, np.float32)) for _ in range(threads)]

    def compare(self, base: Rows, other: Rows, tokens: Sequence[int]) -> tuple[Scores, Tops]:
        """Compare rows of logits, float32 of shape (n_vocab,), after which the text goes on with `tokens`."""
        n = len(tokens)
        out = np.empty((4, n), np.float32)
        tops = Tops.empty(n)
        self._each(n, lambda i, scratch: _compare_row(base[i], other[i], tokens[i], i, out, tops, scratch))
        return Scores(*out), tops

    def ranks(self, rows: Rows, tokens: Sequence[int]) -> np.ndarray:
        """Return the rank of each token in its row, from 1: int32 of shape (n,)."""
        found = np.empty(len(tokens), np.int32)

        def rank(i: int, _: object) -> None:
            found[i] = 1 + np.count_nonzero(rows[i] > rows[i][tokens[i]])

        self._each(len(tokens), rank)
        return found

    def _each(self, n: int, do: Callable[[int, tuple[np.ndarray, np.ndarray]], None]) -> None:
        def part(start: int) -> None:
            for i in range(start, n, self._threads):
                do(i, self._scratch[start])

        for _ in self._pool.map(part, range(self._threads)):
            pass

    def close(self) -> None:
        self._pool.shutdown()


def _compare_row(
    p: np.ndarray,
    q: np.ndarray,
    token: int,
    i: int,
    out: np.ndarray,
    tops: Tops,
    scratch: tuple[np.ndarray, np.ndarray],
) -> None:
    """KL(P‖Q) = Σ P·(p − q) − ln ΣeP + ln ΣeQ. The difference of the logarithms is taken off before the sum, so that
    float32 does not lose a KLD of 1e-5 in terms of a size of 1."""
    weights, work = scratch
    base_top, other_top = int(p.argmax()), int(q.argmax())
    np.subtract(p, p[base_top], out=weights)
    np.exp(weights, out=weights)
    base_sum = float(weights.sum())
    np.subtract(q, q[other_top], out=work)
    np.exp(work, out=work)
    other_sum = float(work.sum())
    base_log, other_log = float(p[base_top]) + np.log(base_sum), float(q[other_top]) + np.log(other_sum)
    np.subtract(p, q, out=work)
    work -= np.float32(base_log - other_log)
    out[0, i] = float(weights @ work) / base_sum
    out[1, i] = base_log - float(p[token])
    out[2, i] = other_log - float(q[token])
    out[3, i] = base_top == other_top
    tops.base[i], tops.other[i] = base_top, other_top
    tops.base_p[i], tops.other_p[i] = 1 / base_sum, 1 / other_sum
