"""Bars and line charts, read from zero. Plain functions for those who compose rows, and a widget around each.

Updating one never causes a layout: sizes come from the style sheet alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

_EIGHTHS = " ▏▎▍▌▋▊▉█"
# Dots of a braille cell from bottom to top, left and right column (Unicode block U+2800).
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
PEAK = "╎"
TRACK = "─"


def nice_max(value: float) -> float:
    """The least of 1, 2, 5, 10, 20, 50 … (and tenths of them) not below `value`; 1 for nothing and for infinity."""
    if not 1e-9 < value < 1e300:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def bar(fraction: float, width: int, peak: float | None = None) -> list[tuple[str, str]]:
    """A bar of `width` cells as (text, part), part being "fill", "track" or "peak".

    `fraction` of the width is filled, in steps of an eighth of a cell; values outside 0..1 are cut off, and a value
    above zero is never drawn as nothing. `peak` sets a mark.
    """
    fraction = min(1.0, max(0.0, fraction if fraction == fraction else 0.0))
    eighths = round(fraction * width * 8)
    if fraction > 0 and width:
        eighths = max(1, eighths)
    full, part = divmod(eighths, 8)
    filled = "█" * full + (_EIGHTHS[part] if part else "")
    cells = [(char, "fill") for char in filled] + [(TRACK, "track")] * (width - len(filled))
    if peak is not None and width:
        cells[min(width - 1, max(0, int(peak * width)))] = (PEAK, "peak")
    merged: list[tuple[str, str]] = []
    for char, kind in cells:
        if merged and merged[-1][1] == kind:
            merged[-1] = (merged[-1][0] + char, kind)
        else:
            merged.append((char, kind))
    return merged


def rule(fraction: float, width: int) -> list[tuple[str, str]]:
    """A bar as thin as a line, in steps of half a cell, for rows that stand close: (text, "fill" or "track")."""
    fraction = min(1.0, max(0.0, fraction))
    full, half = divmod(int(fraction * width * 2), 2)
    filled = "━" * full + "╸" * half
    return [(filled, "fill"), (TRACK * (width - len(filled)), "track")]


def squeeze(values: Sequence[float], count: int) -> list[float]:
    """At most `count` values: means of neighbours, the newest last."""
    size = len(values)
    if size <= count or count <= 0:
        return list(values)
    edges = [round(index * size / count) for index in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def over_time(values: Sequence[float], capacity: int, dots: int) -> list[float]:
    """Values for a chart whose `dots` columns stand for `capacity` samples; fewer samples fill their share of it."""
    count = round(min(len(values), capacity) * dots / capacity) if values else 0
    if count <= len(values):
        return squeeze(values, max(count, min(1, len(values))))
    return [values[index * len(values) // count] for index in range(count)]


def braille(values: Sequence[float], columns: int, rows: int, top: float, filled: bool = False) -> list[str]:
    """A line chart in braille, two by four dots per cell: `rows` strings of `columns` characters.

    The scale goes from zero at the bottom to `top`; values above it are drawn at the top. The newest value is at the
    right edge. `filled` draws down to the base line.
    """
    dots = squeeze(values, columns * 2)
    grid = [[0] * columns for _ in range(rows)]
    height = rows * 4
    start = columns * 2 - len(dots)
    before: int | None = None
    for index, value in enumerate(dots):
        x = start + index
        share = min(1.0, max(0.0, value / top if top > 0 else 0.0))
        y = round(share * (height - 1))
        low, high = (0 if filled else y, y) if before is None or filled else (min(before, y), max(before, y))
        for dot in range(low, high + 1):
            grid[rows - 1 - dot // 4][x // 2] |= _DOTS[x % 2][dot % 4]
        before = y
    return ["".join(chr(0x2800 + cell) for cell in row) for row in grid]


class _Chart(Widget):
    """Rows drawn by `draw`, kept until the figures or the size change."""

    _rows: list[Strip] | None = None

    def draw(self, width: int, height: int) -> list[list[Segment]]:
        raise NotImplementedError

    def redraw(self) -> None:
        """Draw again with the next frame; the size stays as it is."""
        self._rows = None
        self.refresh()

    def style_of(self, name: str) -> Style:
        return self.get_component_rich_style(name)

    def on_resize(self) -> None:
        self._rows = None

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._rows = None

    def render_line(self, y: int) -> Strip:
        width, height = self.size
        if self._rows is None:
            base = self.rich_style
            self._rows = [Strip(row).adjust_cell_length(width, base) for row in self.draw(width, height)]
        return self._rows[y] if y < len(self._rows) else Strip.blank(width, self.rich_style)


class Gauge(_Chart):
    """A one-line bar with an optional peak mark, and a label of fixed width behind it."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"gauge--fill", "gauge--track", "gauge--peak", "gauge--label"}
    DEFAULT_CSS = """
    Gauge {
        height: 1;
        & > .gauge--fill { color: $primary; }
        & > .gauge--track { color: $foreground 30%; }
        & > .gauge--peak { color: $warning; text-style: bold; }
        & > .gauge--label { color: $foreground; }
        &:ansi > .gauge--track { color: ansi_default; text-style: dim; }
    }
    """

    def __init__(self, *, label_width: int = 6, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._label_width = label_width
        self._shown: tuple[float, str, float | None] = (0.0, "", None)

    def update(self, fraction: float, label: str = "", peak: float | None = None) -> None:
        """Show `fraction` (0..1) and `label`, right-aligned in its fixed width; `peak` (0..1) sets the mark."""
        if (fraction, label, peak) != self._shown:
            self._shown = (fraction, label, peak)
            self.redraw()

    def draw(self, width: int, height: int) -> list[list[Segment]]:
        fraction, label, peak = self._shown
        room = max(0, width - self._label_width - 1)
        row = [Segment(text, self.style_of(f"gauge--{part}")) for text, part in bar(fraction, room, peak)]
        row.append(Segment(f" {label:>{self._label_width}}"[: width - room], self.style_of("gauge--label")))
        return [row]


class Timeline(_Chart):
    """A line chart over time: a row with name and scale, below it the curve from zero to a round maximum."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"timeline--line", "timeline--label"}
    DEFAULT_CSS = """
    Timeline {
        height: 4;
        & > .timeline--line { color: $primary; }
        & > .timeline--label { color: $foreground 60%; }
        &:ansi > .timeline--label { color: ansi_default; text-style: dim; }
    }
    """

    def __init__(self, name: str, *, unit: str = "", id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._title = name
        self._unit = unit
        self._values: tuple[float, ...] = ()

    def update(self, values: Sequence[float]) -> None:
        """Show these values, oldest first."""
        self._values = tuple(values)
        self.redraw()

    def draw(self, width: int, height: int) -> list[list[Segment]]:
        top = nice_max(max(self._values, default=0.0))
        scale = f"0–{top:g} {self._unit}".rstrip()
        label = self.style_of("timeline--label")
        head = f"{self._title}{scale:>{max(0, width - len(self._title))}}"[:width]
        line = self.style_of("timeline--line")
        curve = braille(self._values, width, max(0, height - 1), top)
        return [[Segment(head, label)], *([Segment(row, line)] for row in curve)]
