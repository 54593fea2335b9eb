"""Rows of styled text: their palette, wrapping them to a width, and turning them into strips.

A `TextRow` is what renderers produce (runs without a width), a `Line` is what the transcript shows and copies.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from rich.cells import cell_len, split_graphemes
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from cpuchat.base.text import clean, expand_tabs
from cpuchat.protocol.drafters import DRAFTERS
from cpuchat.tui.markdown.fences import FENCE

Run = tuple[str, Style]

# Scripts written without spaces: a line may end after each character, but not before closing punctuation.
_WIDE = "\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff01-\uff60"
_CLOSING = "\u3001\u3002\u3009\u300b\u300d\u300f\u3011\uff01\uff09\uff0c\uff0e\uff1a\uff1b\uff1f\uff5d"
_MAX_PER_CELL = 16  # characters in a row, on average: more are accents upon accents
_MAX_OPEN_ROWS = 20  # of a line that grows; they are wrapped again with each part of it
WORD = re.compile(rf"[^\S\n]*(?:[{_WIDE}][{_CLOSING}]*|[^\s{_WIDE}]+[{_CLOSING}]*)|\s+")

_MAX_STRIPS = 256  # kept; more than the lines of most screens
_drawn: deque[Line] = deque()  # the lines that have one, oldest first


class CodeBlock(NamedTuple):
    """The text of a code block as written, and the language that its fence names ("" for none)."""

    text: str
    language: str


@dataclass(slots=True)
class TextRow:
    """One line of styled text.

    `joint` is what stands between the row before and this one in copied text: a line break, or for a wrapped row the
    spaces that the wrap took. `lead` characters at the start are decoration and are not copied; `bare` rows (code)
    have all decoration in front of them counted in `lead`. `fill` paints the rest of the row."""

    runs: list[Run] = field(default_factory=list)
    joint: str = "\n"
    lead: int = 0
    bare: bool = False
    fill: Style | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.runs)


@dataclass(slots=True)
class Line:
    """A finished row: what is drawn, and how it is copied (see `TextRow`).

    Strips are heavy (seven caches each, and what is in them) and most lines of a chat are never on screen, so they are
    made when asked for, and only those made last are kept."""

    segments: list[Segment]
    width: int
    lead: int
    joint: str
    _strip: Strip | None = field(default=None, init=False, compare=False)

    @property
    def text(self) -> str:
        return "".join([segment.text for segment in self.segments])

    @property
    def strip(self) -> Strip:
        if self._strip is None:
            self._strip = Strip(self.segments, self.width)
            _drawn.append(self)
            if len(_drawn) > _MAX_STRIPS:
                _drawn.popleft()._strip = None
        return self._strip


def wrap(row: TextRow, width: int) -> list[TextRow]:
    """Cut `row` into rows of at most `width` cells, at spaces where it can, inside a word where it must. Code hangs:
    all rows but its first are indented, by two cells more than that.

    No character is lost: joining the texts with the rows' `joint` gives back the text, but for spaces at its end."""
    text = row.text
    if len(text) <= _MAX_PER_CELL * width and (len(text) if text.isascii() else cell_len(text)) <= width:
        return [row]
    rows: list[TextRow] = []
    joint = row.joint
    hanging = max(0, min(len(text) - len(text.lstrip(" ")) + 2, width // 3)) if row.bare else 0
    rest = deque(row.runs)
    at = 0
    for start, end, next_joint in _cuts(text, max(2, width), hanging):
        _take(rest, start - at)
        indent = hanging if rows else 0
        runs = [(" " * indent, row.fill or Style()), *_take(rest, end - start)]
        rows.append(TextRow(runs[not indent :], joint, indent, row.bare, row.fill))
        joint, at = next_joint, end
    return rows


def _cuts(text: str, width: int, hanging: int) -> list[tuple[int, int, str]]:
    cuts: list[tuple[int, int, str]] = []
    start, cells, room = 0, 0, width
    first_indent = len(text) - len(text.lstrip(" "))
    for match in WORD.finditer(text):
        word = match[0]
        size = cell_len(word)
        if cells + size <= room:
            cells += size
            continue
        bare_word = word.lstrip()
        gap = len(word) - len(bare_word)
        at = match.start()
        if not bare_word:  # trailing spaces that stick out stay behind the line's end
            cuts.append((start, at, word))
            start, cells, room = match.end(), 0, width - hanging
            continue
        word_cells = cell_len(bare_word)
        if word_cells <= width - hanging and at > start and at + gap > first_indent:
            cuts.append((start, at, word[:gap]))
            start, cells, room = at + gap, word_cells, width - hanging
            continue
        # Longer than a line: fill what is left of this line, then whole lines.
        for begin, _, size in split_graphemes(word)[0]:
            if cells + size > room and at + begin > start:
                cuts.append((start, at + begin, ""))
                start, cells, room = at + begin, 0, width - hanging
            cells += size
    if start < len(text) or not cuts:
        cuts.append((start, len(text), ""))
    pieces: list[tuple[int, int, str]] = []
    for start, end, joint in cuts:
        while end - start > _MAX_PER_CELL * width:  # thousands of accents fit into one cell, and freeze terminals
            pieces.append((start, start + _MAX_PER_CELL * width, ""))
            start += _MAX_PER_CELL * width
        pieces.append((start, end, joint))
    return pieces


def _take(runs: deque[Run], count: int) -> list[Run]:
    taken: list[Run] = []
    while count > 0 and runs:
        text, style = runs.popleft()
        taken.append((text[:count], style))
        if len(text) > count:
            runs.appendleft((text[count:], style))
        count -= len(text)
    return taken


def prefix(rows: Iterable[TextRow], first: Run, rest: Run) -> list[TextRow]:
    """Put a marker (bullet, bar) before the first row, and an indentation of its width before the others."""
    result = list(rows)
    for index, row in enumerate(result):
        lead = rest if index else first
        row.runs.insert(0, lead)
        if row.bare or row.joint != "\n":
            row.lead += len(lead[0])
    return result


def barred(rows: list[TextRow], bar: Style) -> list[TextRow]:
    """Put a bar before rows of code: dashed, it marks the rest of a line that was too long."""
    return prefix(rows, ("▎ ", bar), ("╎ ", bar))


def plain_rows(text: str, width: int, style: Style) -> list[TextRow]:
    """Wrap `text` as it is; nothing in it is read as markup."""
    lines = (TextRow([(expand_tabs(line), style)]) for line in text.split("\n"))
    return [row for line in lines for row in wrap(line, width)]


class LineStream:
    """Wraps text that grows, as it is: each row once, but for the last ones of an open line.

    `style_of` returns the style of who proposed a part. With a style for its `bar`, fenced code is set off by one."""

    def __init__(self, width: int, style_of: Callable[[str], Style], bar: Style | None = None) -> None:
        self._width = width
        self._style_of = style_of
        self._bar = bar
        self._fence = ""  # that opened the code which the line is in
        self._line: list[Run] = []
        self._joint = "\n"
        self._final: list[TextRow] = []

    def feed(self, text: str, drafter: str = "") -> None:
        style = self._style_of(drafter)
        first, *rest = text.split("\n")
        self._line.append((first, style))
        for part in rest:
            self._final += self._set_off(self._rows())
            if self._bar is not None and (opened := self._opens()) is not None:
                self._fence = "" if self._fence else opened[2]
            self._line, self._joint = [(part, style)], "\n"

    def update(self) -> tuple[list[TextRow], list[TextRow]]:
        """Return new final rows, and the rows of the open line (they replace those of the last call)."""
        tail = self._rows() if any(text for text, _ in self._line) else []
        if len(tail) > _MAX_OPEN_ROWS:
            self._final += self._set_off(tail[:-1])
            self._line, self._joint, tail = tail[-1].runs[bool(tail[-1].lead) :], tail[-1].joint, tail[-1:]
        tail = self._set_off(tail)
        final, self._final = self._final, []
        return final, tail

    def _opens(self) -> re.Match[str] | None:
        """Return the fence that the line is: one that opens code, or ends the code that it is in."""
        found = FENCE.fullmatch("".join(text for text, _ in self._line)) if self._joint == "\n" else None
        ends = found is not None and found[2].startswith(self._fence) and not (self._fence and found[3].strip())
        return found if ends else None

    def _set_off(self, rows: list[TextRow]) -> list[TextRow]:
        if self._bar is None or not rows:
            return rows
        if (fence := self._opens()) is not None:
            label = TextRow([(fence[3].strip()[: self._width - 3], self._bar)], bare=True)
            return [] if self._fence else barred([label], self._bar)
        return barred(rows, self._bar) if self._fence else rows

    def _rows(self) -> list[TextRow]:
        if any("\t" in text for text, _ in self._line):
            line, before, shown = self._line, "", ""
            self._line = []
            for text, style in line:  # where a stop is depends on all text before it
                before += text
                now = expand_tabs(before)
                self._line.append((now[len(shown) :], style))
                shown = now
        row = TextRow([run for run in self._line if run[0]], self._joint, bare=bool(self._fence))
        return wrap(row, self._width - 3 if self._fence else self._width)


def to_line(row: TextRow, width: int, base: Style, gutter: str = "") -> Line:
    """Draw `row` over `base`, `gutter` before it, padded to `width` cells in all.

    This is the last gate to the terminal: whatever a renderer let through is cleaned here."""
    segments = [Segment(gutter, base)] if gutter else []
    cells = len(gutter)
    for text, style in row.runs:
        if text:
            text = clean(text).replace("\n", " ").replace("\t", " ")
            segments.append(Segment(text, base + style))
            cells += len(text) if text.isascii() else cell_len(text)
    if cells < width:
        segments.append(Segment(" " * (width - cells), base + row.fill if row.fill else base))
    if cells > width:
        segments = list(Strip(segments, cells).crop(0, width))
    return Line(segments, width, row.lead + len(gutter), row.joint)


def copied_text(lines: Sequence[Line], start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the text between two (line, character) positions as written: unwrapped, without decoration."""
    parts: list[str] = []
    (first, begin), (last, finish) = start, end
    for index in range(max(0, first), min(last, len(lines) - 1) + 1):
        line = lines[index]
        start_at, stop = begin if index == first else 0, finish if index == last else len(line.text)
        parts += [line.joint, line.text[max(line.lead, start_at) : stop].rstrip(" ")]
    return "".join(parts[1:])


def selected(strip: Strip, start: int, end: int, style: Style) -> Strip:
    """Draw the characters of `strip` from `start` to before `end` (-1: the end) in `style`."""
    text = strip.text
    first = cell_len(text[:start])
    last = strip.cell_length if end == -1 else cell_len(text[:end])
    chosen = strip.crop(first, last)
    chosen = Strip([Segment(part.text, (part.style or style) + style) for part in chosen], chosen.cell_length)
    return Strip.join([strip.crop(0, first), chosen, strip.crop(last, strip.cell_length)])


_PREFIX = "transcript--"

_PLAIN, _BOLD, _DIM, _ITALIC = Style(), Style(bold=True), Style(dim=True), Style(italic=True)
_UNDERLINE, _STRIKE, _BOLD_UNDERLINE = Style(underline=True), Style(strike=True), Style(bold=True, underline=True)


@dataclass(frozen=True)
class TextStyles:
    """Styles to add to `base`. The defaults have no color: for tests and as a fallback."""

    base: Style = _PLAIN
    dim: Style = _DIM
    you: Style = _BOLD
    model: Style = _BOLD
    marker: Style = _BOLD
    notice: Style = _ITALIC
    cursor: Style = _PLAIN
    title: Style = _BOLD_UNDERLINE
    heading: Style = _BOLD
    strong: Style = _BOLD
    emphasis: Style = _ITALIC
    strike: Style = _STRIKE
    code: Style = _PLAIN
    math: Style = _PLAIN
    link: Style = _UNDERLINE
    quote: Style = _ITALIC
    bullet: Style = _PLAIN
    rule: Style = _DIM
    head: Style = _BOLD
    block: Style = _PLAIN
    label: Style = _DIM
    keyword: Style = _BOLD
    string: Style = _PLAIN
    number: Style = _PLAIN
    comment: Style = _ITALIC
    name: Style = _PLAIN
    type: Style = _PLAIN
    inserted: Style = _PLAIN
    deleted: Style = _PLAIN
    undrafted: Style = _BOLD
    changed: Style = _UNDERLINE
    parted: Style = _BOLD_UNDERLINE
    drafters: tuple[Style, ...] = tuple(Style.parse(row.text_style) for row in DRAFTERS)
    """In the order of `DRAFTERS`."""

    def of_drafter(self, name: str) -> Style:
        """Return the style of text that this drafter proposed ("" = the model itself), also an unknown one."""
        return self.undrafted if not name else self.drafters[_POSITIONS.get(name, 0)]


_POSITIONS = {row.name: position for position, row in enumerate(DRAFTERS)}
ROLES = tuple(f.name for f in fields(TextStyles) if f.name not in ("base", "drafters"))
_DRAFTER_CLASSES = tuple(f"{_PREFIX}drafter-{row.name}" for row in DRAFTERS)
COMPONENT_CLASSES = {*(_PREFIX + role for role in ROLES), *_DRAFTER_CLASSES}

COMPONENT_CSS = Path(__file__).with_suffix(".tcss").read_text(encoding="utf-8") + "".join(
    f"    & > .{name} {{ color: {row.color}; text-style: {row.text_style}; }}\n"
    for name, row in zip(_DRAFTER_CLASSES, DRAFTERS, strict=True)
)


def from_widget(widget: Widget) -> TextStyles:
    """Return the palette of `widget`'s theme; `widget` declares `COMPONENT_CLASSES` and styles them in CSS."""

    def own(name: str) -> Style:
        """Return what the component sets itself, its colors blended with the background."""
        styles, full = widget.get_component_styles(name), widget.get_component_rich_style(name)
        color = full.color if styles.has_rule("color") else None
        return Style(color=color, bgcolor=full.bgcolor if styles.has_rule("background") else None) + styles.text_style

    roles: dict[str, Any] = {role: own(_PREFIX + role) for role in ROLES}
    return TextStyles(base=widget.rich_style, drafters=tuple(map(own, _DRAFTER_CLASSES)), **roles)
