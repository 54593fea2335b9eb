"""Prompts that ask a model to fill in the middle of a text (FIM), in the form of llama-server's /infill:

    [REP]name [SEP]file name, text of another file … [SEP]file name [PRE]before [SUF]after [MID]

It is that of Qwen2.5 Coder (arXiv 2409.12186, section 3.1). Without tokens for files, others come before the gap's
between lines that separate them. A begin token comes first, once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Final

from cpuchat.engine.llama.vocab import FillTokens
from cpuchat.protocol.messages import FillIn

_SNIPPET: Final = "\n\n--- snippet ---\n\n"
_MARKERS: Final = 16
"""Tokens of the markers and of the names that are always there, about."""


def fill_prompt(
    tokens: FillTokens, before: str, fill: FillIn, room: int, count: Callable[[str], int], mark: Callable[[str], str]
) -> str:
    """Return a prompt of about `room` tokens at most that asks for what stands between `before` and `fill.suffix`.

    What does not fit is left out: the first other files, then the beginning of `before` and the end of the suffix,
    which has a quarter of the room if the other needs the rest. `count`: returns tokens; `mark`: content without
    control tokens."""
    left, after = room - _MARKERS, fill.suffix
    if (n_before := count(before)) + count(after) > left:
        n_after = max(left // 4, left - n_before)
        after = after[: _longest(len(after), n_after, lambda n: count(after[:n]))]
        before = _end(before, left - count(after), count)
    left -= count(before) + count(after)
    others = list[str]()
    for name, text in reversed(fill.files):
        head = f"{tokens.file}{mark(name)}\n" if tokens.file else _SNIPPET
        left -= count(f"{head}{text}")
        if left < 0:
            break
        others.insert(0, head + mark(text))
    start = f"{tokens.repository}project\n" if tokens.repository else ""
    here = f"{tokens.file}file\n" if tokens.file else ""
    gap = f"{tokens.prefix}{mark(before)}{tokens.suffix}{mark(after)}{tokens.middle}"
    return "".join((start, *others, here, gap))


def _longest(length: int, n: int, count: Callable[[int], int]) -> int:
    """Return the largest number of characters, of `length`, that have at most `n` tokens."""
    return max(bisect_right(range(length + 1), n, key=count) - 1, 0)


def _end(text: str, n: int, count: Callable[[str], int]) -> str:
    """Return the end of a text, of at most `n` tokens. It begins at a multiple of `n` / 2 characters: at the same place
    while more is written, so that what was evaluated is reused."""
    start = len(text) - _longest(len(text), n, lambda length: count(text[len(text) - length :]))
    step = max(n // 2, 1)
    return text[-(-start // step) * step :]
