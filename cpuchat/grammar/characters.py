"""Sets of characters as ranges of code points, and as classes in a grammar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

Ranges = list[tuple[int, int]]

LAST: Final = 0x10FFFF
MOST_RANGES: Final = 4096
"""Ranges of a class: llama.cpp tries them one by one, for each token of the vocabulary."""
_IN_TEXTS: Final = ((0x09, 0x0A), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, LAST))


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the same code points as ascending ranges with gaps between them."""
    found: Ranges = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return found


def without(ranges: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> Ranges:
    """Return the code points of `ranges` that are in none of `others`, as `merged`."""
    left: Ranges = []
    gone = [*merged(others), (LAST + 1, LAST + 1)]
    at = 0
    for low, high in merged(ranges):
        while gone[at][1] < low:
            at += 1
        n = at
        while low <= high:
            first, last = gone[n]
            if low < first:
                left.append((low, min(high, first - 1)))
            low, n = max(low, last + 1), n + 1
    return left


def character_class(ranges: Ranges) -> str:
    """Return the class of GBNF for one character out of `ranges`."""
    return f"[{''.join(_range(low, high) for low, high in ranges)}]"


def any_but(characters: str) -> str:
    """Return the class of GBNF for all characters of texts but these. llama.cpp lets `[^…]` match invalid UTF-8."""
    return character_class(without(list(_IN_TEXTS), [(ord(one), ord(one)) for one in characters]))


def _range(low: int, high: int) -> str:
    return _code(low) if low == high else f"{_code(low)}-{_code(high)}"


def _code(code: int) -> str:
    character = chr(code)
    if code < 0x80 and (character.isalnum() or character in " _"):
        return character
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
