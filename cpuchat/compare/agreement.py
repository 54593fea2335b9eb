"""How far two models agree on an answer: each reads both answers, and predicts every token of them.

A token agrees: it is the other's most probable token too; is close: another one is, but this one has at least `MATTERS`
of the other's probability, a rephrasing as a rule; or matters: it has less.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from cpuchat.base.text import common_prefix
from cpuchat.protocol.messages import Score, ScoredRows, TokensScored
from cpuchat.quality.statistics import Interval, clustered_share, wilson

MATTERS = 0.1
Step = Literal["agrees", "close", "matters"]

_BLOCK_BYTES = 39 << 20
"""Of the rows of a pass: in the output buffers of both workers and in the file between them: under 128 MB."""
_TILE = 64
"""Fewer tokens in a pass take longer for each: see `engine.decoding.decode`."""
_MAX_ROWS = 512
_CLUSTER, _MIN_CLUSTERS = 25, 4
"""Words in a row that go wrong together, for the interval; with fewer clusters it is Wilson's."""
_CONTEXT = 48
_WORD = re.compile(r"\S+")


class ScoredToken(msgspec.Struct, frozen=True, array_like=True):
    """A token of an answer, characters `start` to `end` of reasoning and content. `p` is its writer's probability,
    `p_other` the other's, `rank` its rank there, from 1; `top` is the other's most probable token with `p_top`, `kld`
    is KL(writer ‖ other) in nats before this token."""

    start: int
    end: int
    p: float
    p_other: float
    rank: int
    kld: float
    top: str
    p_top: float

    @property
    def step(self) -> Step:
        if self.rank == 1:
            return "agrees"
        return "close" if self.p_other >= MATTERS else "matters"


class UnlikelyWord(msgspec.Struct, frozen=True, kw_only=True):
    """A word that the other would hardly have written: its first token that matters. `token` is the number of that,
    from 0, `character` where it begins, `before` the text before it; `text` and `p` are the writer's choice, `top` and
    `p_top` the other's, `p_other` what that gave the writer's."""

    token: int
    character: int
    before: str
    text: str
    p: float
    p_other: float
    top: str
    p_top: float


class AnswerAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """One side's answer as the other predicts it. `words` is the share of its `n_words` words whose tokens all are the
    other's most probable ones, with the 95 % interval (clusters of `_CLUSTER` words; Wilson's for short answers).
    `same_top` (0-1), `kld` (mean, nats) and both perplexities are those of `cpuchat quality` over these tokens."""

    tokens: tuple[ScoredToken, ...]
    n_words: int
    words: Interval
    places: tuple[UnlikelyWord, ...]
    same_top: float
    kld: float
    ppl: float
    ppl_other: float


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Both answers, A's first."""

    answers: tuple[AnswerAgreement, AnswerAgreement]


@dataclass(frozen=True)
class Written:
    """An answer as its worker told it. `ends`: where the text of each token ends in `text`."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    text: str
    ends: Sequence[int]

    @property
    def all_tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.tokens)


Run = Callable[[int, Score], Awaitable[TokensScored]]
"""Runs a command on a side."""


@dataclass
class _Block:
    """The tokens before `end` of the text of a side, the last `n` of which are predicted; `bases` as in `Score`."""

    side: int
    end: int
    n: int
    bases: tuple[Literal["file", "own"], ...]


async def score_answers(
    written: tuple[Written, Written], n_vocab: int, run: Run, *, tell: Callable[[float], None] = lambda share: None
) -> Agreement:
    """Let both sides predict both answers; A's worker writes its predictions, B's compares them with its own. `tell`
    gets the share that is done (0-1). Raises as `run`."""
    n_rows = rows_of_block(n_vocab)
    blocks = _blocks(written, n_rows)
    n_ctx = max(len(one.all_tokens) for one in written)
    rows: tuple[list[ScoredRows], list[ScoredRows]] = ([], [])  # of A's answer, and of B's
    order = [(worker, block) for block in blocks for worker in (0, 1)]
    with _shared_rows() as file:
        for done, (worker, block) in enumerate(order):
            one = written[block.side]
            command = Score(
                tokens=one.all_tokens[: block.end], n=block.n, n_prompt=len(one.prompt), n_ctx=n_ctx, n_rows=n_rows,
                file=file, bases=block.bases if worker else (),
            )  # fmt: skip
            found = await run(worker, command)
            for base, compared in zip(block.bases, found.compared, strict=False):
                rows[base == "own"].append(compared)
            tell((done + 1) / len(order))
    a, b = map(_answer, written, rows)
    return Agreement(answers=(a, b))


def rows_of_block(n_vocab: int) -> int:
    """Return how many tokens are predicted in one pass."""
    return min(max(_BLOCK_BYTES // (4 * n_vocab) // _TILE * _TILE, _TILE), _MAX_ROWS)


def _blocks(written: tuple[Written, Written], n_rows: int) -> list[_Block]:
    """Cut both texts into blocks of `n_rows` tokens; whole blocks with which both begin are read once. Shorter blocks
    would be slower for each token, and passes of other lengths round in other ways."""
    (a, first_a), (b, first_b) = ((one.all_tokens, len(one.prompt)) for one in written)
    n_shared = common_prefix(a, b) - first_a if first_a == first_b else 0
    n_both = n_shared if a == b else max(n_shared, 0) // n_rows * n_rows
    parts: list[tuple[int, int, int, tuple[Literal["file", "own"], ...]]] = [
        (0, first_a, first_a + n_both, ("file", "own")),
        (0, first_a + n_both, len(a), ("file",)),
        (1, first_b + n_both, len(b), ("own",)),
    ]
    return [
        _Block(side, min(cut + n_rows, end), min(n_rows, end - cut), bases)
        for side, start, end, bases in parts
        for cut in range(start, end, n_rows)
    ]


@contextlib.contextmanager
def _shared_rows() -> Iterator[str]:
    """Yield the path of a file that ends with this process, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("cpuchat-rows"), "w+b") as file:
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as named:
            yield named.name


def _answer(written: Written, parts: Sequence[ScoredRows]) -> AnswerAgreement:
    def array(name: str, kind: str = "<f4") -> np.ndarray:
        return np.concatenate([np.frombuffer(getattr(one, name), kind) for one in parts])

    base, other, kld, p_tops = map(array, ("base_nll", "other_nll", "kld", "tops_p"))
    ranks = array("ranks", "<i4")
    tops = [top for one in parts for top in one.tops]
    starts = [0, *written.ends]
    tokens = tuple(
        ScoredToken(
            start=starts[i], end=starts[i + 1], p=_rounded(np.exp(-base[i])), p_other=_rounded(np.exp(-other[i])),
            rank=int(ranks[i]), kld=_rounded(kld[i]), top=tops[i], p_top=_rounded(p_tops[i]),
        )
        for i in range(len(base))
    )  # fmt: skip
    words = list(_words(written.text, tokens))
    agreed = np.array([all(token.rank == 1 for token in tokens[first:last]) for first, last in words], np.float64)
    sizes, share = [len(part) for part in np.array_split(agreed, len(words) // _CLUSTER or 1)], Interval(1.0, 0.0, 1.0)
    if words:
        few = len(sizes) < _MIN_CLUSTERS
        share = wilson(float(agreed.mean()), len(words)) if few else clustered_share(agreed, sizes)
    return AnswerAgreement(
        tokens=tokens, n_words=len(words), words=share, places=tuple(_places(written.text, tokens, words)),
        same_top=float(array("same_top").mean(dtype=np.float64)), kld=float(kld.mean(dtype=np.float64)),
        ppl=float(np.exp(base.mean(dtype=np.float64))), ppl_other=float(np.exp(other.mean(dtype=np.float64))),
    )  # fmt: skip


def _rounded(value: float) -> float:
    return round(float(value), 6)


def _words(text: str, tokens: Sequence[ScoredToken]) -> Iterator[tuple[int, int]]:
    """Yield the range of tokens of each word: those with a character of it, and those before them without a text."""
    ends = [token.end for token in tokens]
    for word in _WORD.finditer(text):
        first, last = bisect.bisect_right(ends, word.start()), bisect.bisect_left(ends, word.end()) + 1
        while first and tokens[first - 1].end == tokens[first - 1].start == word.start():
            first -= 1  # part of a character, which a later token completes
        if first < len(tokens):
            yield first, min(last, len(tokens))


def _places(text: str, tokens: Sequence[ScoredToken], words: Sequence[tuple[int, int]]) -> Iterator[UnlikelyWord]:
    seen = -1
    for first, last in words:
        number = next((i for i in range(max(first, seen + 1), last) if tokens[i].step == "matters"), None)
        if number is None:
            continue
        token, seen = tokens[number], number
        start = max(token.start - _CONTEXT, 0)
        if start and (space := text.find(" ", start - 1, token.start)) >= 0:
            start = space + 1
        yield UnlikelyWord(
            token=number, character=token.start, before=text[start : token.start], text=text[token.start : token.end],
            p=token.p, p_other=token.p_other, top=token.top, p_top=token.p_top,
        )  # fmt: skip


def spans(tokens: Sequence[ScoredToken], start: int, end: int) -> list[tuple[int, int, Step]]:
    """Return the ranges of characters that do not agree within `start` to `end` of what was written, relative to
    `start`; neighbors of the same step are one."""
    found: list[tuple[int, int, Step]] = []
    for token in tokens:
        left, right = max(token.start, start) - start, min(token.end, end) - start
        if left >= right or token.step == "agrees":
            continue
        if found and found[-1][1:] == (left, token.step):
            left = found.pop()[0]
        found.append((left, right, token.step))
    return found
