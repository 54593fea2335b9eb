"""Marks the words of a rendered answer that differ from another one: by word, whatever Markdown made of them.

Both are rendered for the same width, so that tables and code compare as they are seen.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from rich.style import Style

from cpuchat.base.text import common_prefix
from cpuchat.tui.markdown.palette import Palette
from cpuchat.tui.markdown.rows import Row, Run

FIRST_MARK = "▸"
"""Stands before the first word that differs, for terminals without colors."""
_WORD = re.compile(r"\S+")
# Compared word by word; of an answer with more, all words behind the first difference are marked.
_MOST_WORDS = 4000
_MOST_PAIRS = 60_000  # of equal words, one on either side: what repeats itself takes minutes


class _Word(NamedTuple):
    row: int
    start: int
    end: int
    text: str


def mark_differences(rows: list[Row], other: Sequence[Row], palette: Palette) -> None:
    """Mark in `rows`, in place, the first word that differs from `other`, and from there on all others."""
    ours, theirs = _words(rows), _words(other)
    a, b = [word.text for word in ours], [word.text for word in theirs]
    common = common_prefix(a, b)
    if common == len(a):
        return
    changed = range(common, len(a))
    there = Counter(b[common:])
    n_pairs = sum(there[word] for word in a[common:])
    if len(a) + len(b) - 2 * common <= _MOST_WORDS and n_pairs <= _MOST_PAIRS:
        matcher = SequenceMatcher(None, a[common:], b[common:], autojunk=False)
        changed = [
            common + at for tag, first, end, _, _ in matcher.get_opcodes() if tag != "equal" for at in range(first, end)
        ]
    for at in reversed(changed):  # from the end: a mark moves what stands behind it
        word = ours[at]
        _restyle(rows[word.row], word.start, word.end, palette.changed)
    first = ours[common]
    _restyle(rows[first.row], first.start, first.end, palette.parted)
    _insert(rows[first.row], first.start, (FIRST_MARK, palette.parted))


def _words(rows: Sequence[Row]) -> list[_Word]:
    return [
        _Word(number, match.start(), match.end(), match[0])
        for number, row in enumerate(rows)
        for match in _WORD.finditer(row.text, row.lead)
    ]


def _restyle(row: Row, start: int, end: int, style: Style) -> None:
    runs: list[Run] = []
    at = 0
    for text, old in row.runs:
        first, last = max(start - at, 0), min(end - at, len(text))
        if first >= last:
            runs.append((text, old))
        else:
            runs += [(text[:first], old), (text[first:last], old + style), (text[last:], old)]
        at += len(text)
    row.runs = [run for run in runs if run[0]]


def _insert(row: Row, at: int, run: Run) -> None:
    runs: list[Run] = []
    for text, style in row.runs:
        if 0 <= at < len(text):
            runs += [(text[:at], style), run, (text[at:], style)]
            at = -1
        else:
            runs.append((text, style))
            at = at - len(text) if at >= 0 else at
    row.runs = [one for one in runs if one[0]]
