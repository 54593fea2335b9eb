"""Bars and line charts as rows of text, read from zero."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉█"
# Dots of a braille cell from bottom to top, left and right column (Unicode block U+2800).
_DOTS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))
LEVELS = "▁▂▃▄▅▆▇█"
PEAK = "╎"
TRACK = "─"


def nice_max(value: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, 50 … (and tenths of them) not below `value`; 1 for nothing and for
    infinity."""
    if not 1e-9 < value < 1e300:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value * (1 - 1e-9))


def bar(fraction: float, width: int, *peaks: float) -> list[tuple[str, str]]:
    """Draw a bar of `width` cells as (text, part), part being "fill", "track" or "peak".

    `fraction` of the width is filled, in steps of an eighth of a cell; values outside 0..1 are cut off, and a value
    above zero is never drawn as nothing. Each of `peaks` sets a mark."""
    fraction = min(1.0, max(0.0, fraction if fraction == fraction else 0.0))
    eighths = round(fraction * width * 8)
    if fraction > 0 and width:
        eighths = max(1, eighths)
    full, part = divmod(eighths, 8)
    filled = "█" * full + (_EIGHTHS[part] if part else "")
    cells = [(char, "fill") for char in filled] + [(TRACK, "track")] * (width - len(filled))
    for peak in peaks if width else ():
        cells[min(width - 1, max(0, int(peak * width)))] = (PEAK, "peak")
    return merged(cells)


def merged(parts: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    groups = itertools.groupby(parts, key=lambda part: part[1])
    return [("".join(text for text, _ in group), kind) for kind, group in groups]


def squeeze(values: Sequence[float], count: int) -> list[float]:
    size = len(values)
    if size <= count or count <= 0:
        return list(values)
    edges = [round(index * size / count) for index in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def over_time(values: Sequence[float], capacity: int, dots: int) -> list[float]:
    """Resample for a chart whose `dots` columns stand for `capacity` samples; fewer samples fill their share."""
    count = round(min(len(values), capacity) * dots / capacity) if values else 0
    if count <= len(values):
        return squeeze(values, max(count, min(1, len(values))))
    return [values[index * len(values) // count] for index in range(count)]


def braille(values: Sequence[float], columns: int, rows: int, top: float) -> list[str]:
    """Draw an area chart in braille, two by four dots per cell: `rows` strings of `columns` characters.

    The scale goes from zero at the bottom to `top`; values above it are drawn at the top. The newest value is at the
    right edge."""
    dots = squeeze(values, columns * 2)
    grid = [[0] * columns for _ in range(rows)]
    height = rows * 4
    start = columns * 2 - len(dots)
    for x, value in enumerate(dots, start):
        share = min(1.0, max(0.0, value / top if top > 0 else 0.0))
        for dot in range(round(share * (height - 1)) + 1):
            grid[rows - 1 - dot // 4][x // 2] |= _DOTS[x % 2][dot % 4]
    return ["".join(chr(0x2800 + cell) for cell in row) for row in grid]


# Five rows of up to three dots each, an octal digit per row.
_GLYPHS = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717", "6": "74757", "7": "71244",
    "8": "75757", "9": "75717", ".": "00001", ",": "00013", "%": "51245",
}  # fmt: skip
_HALVES = {(0, 0): " ", (1, 0): "▀", (0, 1): "▄", (1, 1): "█"}


def big_digits(text: str, large: bool = False) -> list[str]:
    """Draw a number, with % and separators, in three rows of half blocks, or `large` in five rows of whole ones. Other
    characters are left out."""
    dots: list[list[int]] = [[] for _ in range(5)]
    for glyph in (_GLYPHS[char] for char in text if char in _GLYPHS):
        wide = max(int(octal).bit_length() for octal in glyph)
        for row, octal in zip(dots, glyph, strict=True):
            row += [*([0] if row else []), *(int(octal) >> bit & 1 for bit in reversed(range(wide)))]
    if large:
        return ["".join("██" if dot else "  " for dot in row) for row in dots]
    dots.append([0] * len(dots[0]))
    pairs = zip(dots[::2], dots[1::2], strict=True)
    return ["".join(_HALVES[both] for both in zip(upper, lower, strict=True)) for upper, lower in pairs]
