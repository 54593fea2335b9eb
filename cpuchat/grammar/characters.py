"""Sets of characters as ranges of code points, and as classes in a grammar."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

Ranges = list[tuple[int, int]]

LAST: Final = 0x10FFFF
_IN_TEXTS: Final = ((0x09, 0x0A), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, LAST))


def without(ranges: Ranges, others: Iterable[tuple[int, int]]) -> Ranges:
    """Return the code points of `ranges` that are in none of `others`."""
    for low, high in others:
        left: Ranges = []
        for first, last in ranges:
            left += [(a, b) for a, b in ((first, min(last, low - 1)), (max(first, high + 1), last)) if a <= b]
        ranges = left
    return ranges


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
