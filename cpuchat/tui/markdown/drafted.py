"""Renders answers with drafted tokens colored: as plain text while they are written, then as Markdown.

Of Markdown only the layout is kept: its styles would be taken for those of drafters. Bold, plain, underlined and italic
tell the drafters apart without colors too.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import groupby
from operator import itemgetter

from rich.style import Style

from cpuchat.protocol.drafters import DRAFTERS
from cpuchat.tui.markdown.palette import Palette
from cpuchat.tui.markdown.render import render
from cpuchat.tui.markdown.rows import LineStream, Row, Run, wrap

Span = tuple[int, str]
"""Characters, and the drafter that proposed them ("" = the model itself)."""
Spans = tuple[Span, ...]

_NAMES = {"": "the model", **{row.name: row.name for row in DRAFTERS}}
_NOBODY = "\0"  # decoration
_TOKEN = re.compile(r"[^\W_]+|[^\w\s]|_")
_WORD_REACH = 24  # times its length: an address, of which nothing is shown, may come before a word
_MARK_REACH = 8  # characters of markup before a punctuation mark


class SpanList:
    """Spans of a growing text; adjacent spans of one drafter are merged."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    def add(self, length: int, drafter: str) -> None:
        """Add `length` characters proposed by `drafter`."""
        if not length:
            return
        if self._spans and self._spans[-1][1] == drafter:
            length += self._spans.pop()[0]
        self._spans.append((length, drafter))

    def spans(self) -> Spans:
        return tuple(self._spans)


class DraftedStream(LineStream):
    """Renders as `streaming.Stream`: feed it text, ask for rows."""

    def __init__(self, width: int, palette: Palette) -> None:
        super().__init__(width, palette.of_drafter)


def pieces(text: str, spans: Spans) -> list[tuple[str, str]]:
    """Cut `text` into its spans, each with its drafter; text beyond them is the model's own."""
    found: list[tuple[str, str]] = []
    at = 0
    for length, drafter in spans:
        found.append((text[at : at + length], drafter))
        at += length
    return [*found, (text[at:], "")]


def drafted_rows(text: str, spans: Spans, width: int, palette: Palette) -> list[Row]:
    """Render `text` as Markdown, colored by `spans` in place of its own styles.

    What is shown is found again in `text` from word to word. A word that is not in there, as those of a formula may be,
    counts as proposed by who proposed the one before.
    """
    rows = render(text, width, palette)
    drafters = [drafter for piece, drafter in pieces(text, spans) for _ in piece]
    at = 0
    for row in rows:
        proposed = [_NOBODY] * len(row.text)
        for token in _TOKEN.finditer(row.text, row.lead):
            is_word = token[0].isalnum()
            reach = _WORD_REACH * len(token[0]) if is_word else _MARK_REACH
            found = text.find(token[0], at, at + reach + len(token[0]))
            if found >= 0:
                at = found + len(token[0])
                proposed[token.start() : token.end()] = drafters[found:at]
            elif is_word and drafters:
                proposed[token.start() : token.end()] = [drafters[max(0, at - 1)]] * len(token[0])
        for place, character in enumerate(row.text[1:-1], 1):
            if character == " " and _NOBODY not in (proposed[place - 1], proposed[place + 1]):
                proposed[place] = proposed[place + 1]  # tokens begin with their space
        row.runs = _recolored(row, proposed, palette)
    return rows


def _recolored(row: Row, proposed: list[str], palette: Palette) -> list[Run]:
    """Return the runs of `row` with each character in the style of who `proposed` it; decoration keeps its own."""
    runs: list[Run] = []
    at = 0
    for text, style in row.runs:
        ground = Style(bgcolor=style.bgcolor, link=style.link)
        for drafter, part in groupby(zip(proposed[at : at + len(text)], text, strict=True), key=itemgetter(0)):
            shown = "".join(character for _, character in part)
            if drafter != _NOBODY:
                runs.append((shown, ground + palette.of_drafter(drafter)))
            else:
                runs.append((shown, style if shown.strip() else ground))
        at += len(text)
    return runs


def legend(spans: Spans, width: int, palette: Palette) -> list[Row]:
    """Explain the colors, with shares of the text for a complete answer (`spans` given)."""
    counts: Counter[str] = Counter()
    for length, drafter in spans:
        counts[drafter] += length
    total = counts.total()
    rows = [Row([("proposed by ", palette.dim)])]
    shown = [drafter for drafter in _NAMES if counts[drafter] or not total]
    for drafter in shown:
        part: list[Run] = [(_NAMES[drafter], palette.of_drafter(drafter))]
        tail = f" {100 * counts[drafter] / total:.0f} %" if total else ""
        part.append((tail + (", " if drafter != shown[-1] else ""), palette.dim))
        if len(rows[-1].runs) > 1 and len(rows[-1].text) + len("".join(text for text, _ in part).rstrip()) > width:
            rows.append(Row(joint=" "))
        rows[-1].runs += part
    return [row for wide in rows for row in wrap(wide, width)]
