"""How far two models agree on an answer itself: each reads both answers, and predicts every token of them.

For each token that a side has written there is the probability that it gave it and the one that the other gave it. So
the agreement is about the whole answer, where the texts as such tell only up to their first difference.

A token is in one of three steps:

- agrees: it is the other's most probable token too.
- close: another one is, but this one has at least `MATTERS` of the other's probability: a rephrasing as a rule.
- matters: it has less. At a temperature of 1 the other would write it less than once in ten times.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Literal, get_args

import msgspec
import numpy as np

from cpuchat.base import paths
from cpuchat.base.errors import UsageError
from cpuchat.base.text import common_prefix
from cpuchat.protocol.messages import Score, ScoredRows, TokensScored
from cpuchat.quality.statistics import Interval, clustered_share, wilson

MATTERS = 0.1
Step = Literal["agrees", "close", "matters"]
STEPS: tuple[Step, ...] = get_args(Step)

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
    """A token of an answer, characters `start` to `end` of what was written: the reasoning, then the content.

    `p` is the probability that its writer gave it, `p_other` the other's, `rank` its rank with the other, from 1. `top`
    is the other's most probable token with `p_top`, `kld` is KL(writer ‖ other) in nats before this token.
    """

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
    """A word that the other would hardly have written: the first token of it that matters.

    `token` is its number from 0, `character` where it begins in what was written, `before` the text before it, `text`
    and `p` the writer's choice, `top` and `p_top` the other's, `p_other` what that gave the writer's.
    """

    token: int
    character: int
    before: str
    text: str
    p: float
    p_other: float
    top: str
    p_top: float


class AnswerAgreement(msgspec.Struct, frozen=True, kw_only=True):
    """One side's answer as the other predicts it.

    `words` is the share of its `n_words` words of which the other's most probable tokens are all tokens, with the 95 %
    interval (clusters of `_CLUSTER` words; Wilson's for short answers). `same_top` (0-1), `kld` (mean, nats) and the
    perplexities of writer and other are those of `cpuchat quality` over these tokens.
    """

    tokens: tuple[ScoredToken, ...]
    n_words: int
    words: Interval
    places: tuple[UnlikelyWord, ...]
    same_top: float
    kld: float
    ppl: float
    ppl_other: float


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Both answers, A's first. `evaluating` are the seconds that each worker spent in its passes, `comparing` those
    between them; 0 of one that was kept."""

    answers: tuple[AnswerAgreement, AnswerAgreement]
    evaluating: tuple[float, float] = (0.0, 0.0)
    comparing: float = 0.0


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
    """The tokens before `end` of the text of a side, the last `n` of which are predicted; `bases` as in `Score`, in the
    order of the answers that they belong to."""

    side: int
    end: int
    n: int
    bases: tuple[Literal["file", "own"], ...]
    at: int = 0


@dataclass
class _Figures:
    """What is known of the tokens of one answer."""

    rows: list[ScoredRows] = field(default_factory=list)

    def array(self, name: str, kind: str = "<f4") -> np.ndarray:
        return np.concatenate([np.frombuffer(getattr(one, name), kind) for one in self.rows])


async def score_answers(
    written: tuple[Written, Written],
    n_vocab: int,
    run: Run,
    *,
    in_turn: bool = False,
    tell: Callable[[float], None] = lambda share: None,
) -> Agreement:
    """Let both sides predict both answers; A's worker writes its predictions, B's compares them with its own.

    Args:
        in_turn: only one of them is in memory: all predictions of A are kept on disk meanwhile.
        tell: called with the share that is done (0-1).

    Raises:
        UsageError: the disk has no room; what `run` raises.
    """
    n_rows = rows_of_block(n_vocab)
    blocks = _blocks(written, n_rows)
    n_ctx = max(len(one.all_tokens) for one in written)
    seconds, comparing = [0.0, 0.0], 0.0
    figures = _Figures(), _Figures()
    order = [(worker, block) for block in blocks for worker in (0, 1)]
    if in_turn:
        order = [(worker, block) for worker in (0, 1) for block in blocks]
    with _shared_rows(sum(one.n for one in blocks) * 4 * n_vocab if in_turn else 0) as file:
        for done, (worker, block) in enumerate(order):
            one = written[block.side]
            found = await run(
                worker,
                Score(
                    tokens=one.all_tokens[: block.end],
                    n=block.n,
                    n_prompt=len(one.prompt),
                    n_ctx=n_ctx,
                    n_rows=n_rows,
                    file=file,
                    at=block.at if in_turn else 0,
                    bases=block.bases if worker else (),
                ),
            )
            seconds[worker] += found.seconds
            comparing += found.compare_seconds
            for base, rows in zip(block.bases, found.compared, strict=False):
                figures[base == "own"].rows.append(rows)
            tell((done + 1) / len(order))
    a, b = (_answer(one, figure) for one, figure in zip(written, figures, strict=True))
    return Agreement(answers=(a, b), evaluating=(seconds[0], seconds[1]), comparing=comparing)


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
    blocks, at = list[_Block](), 0
    for side, start, end, bases in parts:
        for cut in range(start, end, n_rows):
            n = min(n_rows, end - cut)
            blocks.append(_Block(side, cut + n, n, bases, at))
            at += n
    return blocks


@contextlib.contextmanager
def _shared_rows(size: int) -> Iterator[str]:
    """Yield the path of a file that ends with this process: in memory, or on disk for `size` bytes.

    Raises:
        UsageError: the disk has no room.
    """
    folder = paths.quality_dir()
    if size or not hasattr(os, "memfd_create"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if size > shutil.disk_usage(folder).free:
            raise UsageError(f"{paths.shown(folder)} needs {size / 1e9:.1f} GB for the predictions.", "Make room.")
        make = tempfile.TemporaryFile if hasattr(os, "O_TMPFILE") else tempfile.NamedTemporaryFile
        file: IO[bytes] = make(dir=folder)
    else:
        file = os.fdopen(os.memfd_create("cpuchat-rows"), "w+b")
    with file:
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}" if isinstance(file.name, int) else file.name


def _answer(written: Written, figures: _Figures) -> AnswerAgreement:
    base, other = figures.array("base_nll"), figures.array("other_nll")
    kld, ranks, p_tops = figures.array("kld"), figures.array("ranks", "<i4"), figures.array("tops_p")
    tops = [top for rows in figures.rows for top in rows.tops]
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
    return AnswerAgreement(
        tokens=tokens,
        n_words=len(words),
        words=_share(agreed),
        places=tuple(_places(written.text, tokens, words)),
        same_top=float(figures.array("same_top").mean(dtype=np.float64)),
        kld=float(kld.mean(dtype=np.float64)),
        ppl=float(np.exp(base.mean(dtype=np.float64))),
        ppl_other=float(np.exp(other.mean(dtype=np.float64))),
    )


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


def _share(agreed: np.ndarray) -> Interval:
    n = len(agreed)
    if not n:
        return Interval(1.0, 0.0, 1.0)
    sizes = [len(part) for part in np.array_split(agreed, n // _CLUSTER or 1)]
    return clustered_share(agreed, sizes) if len(sizes) >= _MIN_CLUSTERS else wilson(float(agreed.mean()), n)


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
            token=number,
            character=token.start,
            before=text[start : token.start],
            text=text[token.start : token.end],
            p=token.p,
            p_other=token.p_other,
            top=token.top,
            p_top=token.p_top,
        )


def spans(tokens: Sequence[ScoredToken], start: int, end: int) -> list[tuple[int, int, Step]]:
    """Return the ranges of characters that do not agree within `start` to `end` of what was written, relative to
    `start`; neighbors of the same step are one range."""
    found: list[tuple[int, int, Step]] = []
    for token in tokens:
        left, right = max(token.start, start) - start, min(token.end, end) - start
        if left >= right or token.step == "agrees":
            continue
        if found and found[-1][1:] == (left, token.step):
            left = found.pop()[0]
        found.append((left, right, token.step))
    return found
