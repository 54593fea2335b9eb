"""Expressions for the numbers within bounds, written as JSON writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_DIGITS: Final = 16  # more would not survive a reader that uses doubles
_TOP: Final = 10**_DIGITS
_FRACTION: Final = '("." [0-9]{1,16})?'


@dataclass(frozen=True)
class Bounds:
    """The bounds of a number; None: none. An open one is not part of it."""

    low: int | None = None
    high: int | None = None
    low_open: bool = False
    high_open: bool = False


def numbers(bounds: Bounds, *, whole: bool) -> str:
    """Return an expression for the numbers within `bounds`; with fractions unless `whole`, never with an exponent.

    Raises:
        ValueError: there are none.
    """
    low, high = bounds.low, bounds.high
    parts: list[str] = []
    if high is None or high >= 0:
        least, is_open = (low, bounds.low_open) if low is not None and low >= 0 else (0, False)
        parts += _magnitudes(least, high, is_open, bounds.high_open, whole)
    if low is None or low < 0:
        # Zero has no sign, so magnitudes begin above it.
        least, is_open = (-high, bounds.high_open) if high is not None and high < 0 else (0, True)
        negative = _magnitudes(least, None if low is None else -low, is_open, bounds.low_open, whole)
        parts += [f'"-" ({" | ".join(negative)})'] if negative else []
    if not parts:
        raise ValueError("there is no number within these bounds")
    return " | ".join(parts)


def _magnitudes(least: int, most: int | None, least_open: bool, most_open: bool, whole: bool) -> list[str]:
    """Return alternatives for the numbers from `least` >= 0 to `most`."""
    if most is None or most >= _TOP:
        most, most_open = _TOP, True
    if whole:
        return _integers(least + least_open, most - most_open)
    parts = [f"({' | '.join(found)}) {_FRACTION}" for found in (_integers(least + least_open, most - 1),) if found]
    if least_open and least < most:
        parts.append(f'"{least}." [0-9]{{0,15}} [1-9]')
    if not most_open and (most > least or (most == least and not least_open)):
        parts.append(f'"{most}" ("." "0"{{1,16}})?')
    return parts


def _integers(low: int, high: int) -> list[str]:
    """Return alternatives for the integers from `low` to `high`, both at least 0."""
    if low > high:
        return []
    parts: list[str] = []
    if low == 0:
        if high < 10:
            return [_between("0", str(high))]
        parts.append('"0"')
        low = 1
    full: tuple[int, int] | None = None  # lengths of which all numbers belong to it
    for length in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (length - 1)), min(high, 10**length - 1)
        if (first, last) == (10 ** (length - 1), 10**length - 1):
            full = (full[0] if full else length, length)
        else:
            parts.append(_between(str(first), str(last)))
    if full:
        parts.append(f"[1-9] [0-9]{{{full[0] - 1},{full[1] - 1}}}" if full[1] > 1 else "[1-9]")
    return parts


def _between(low: str, high: str) -> str:
    """Return an expression for the numbers from `low` to `high`, which have the same number of digits."""
    same = 0
    while same < len(low) and low[same] == high[same]:
        same += 1
    if same == len(low):
        return f'"{low}"'
    prefix, low, high = low[:same], low[same:], high[same:]
    rest = len(low) - 1
    digits = f" [0-9]{{{rest}}}" if rest else ""
    start, end = int(low[0]), int(high[0])
    parts: list[str] = []
    if low[1:] != "0" * rest:
        parts.append(f'"{start}" ({_between(low[1:], "9" * rest)})')
        start += 1
    top = ""
    if high[1:] != "9" * rest:
        top = f'"{end}" ({_between("0" * rest, high[1:])})'
        end -= 1
    if start <= end:
        parts.append(f"[{start}-{end}]{digits}")
    if top:
        parts.append(top)
    body = " | ".join(parts)
    return f'"{prefix}" ({body})' if prefix else body
