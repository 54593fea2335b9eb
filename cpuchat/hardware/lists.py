"""Parses and formats the kernel's lists of numbers: `0-3,8`."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import Final

LIST: Final = r"[0-9]{1,4}(?:-[0-9]{1,4})?(?:,[0-9]{1,4}(?:-[0-9]{1,4})?)*"
"""A list as a user may write it, as a regular expression."""
_MAX = 65_535  # far above the kernel's NR_CPUS; a range is spelled out, so nonsense must not fill the memory


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse `0-3,8` into ascending numbers; invalid parts and numbers above 65535 are skipped."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = (piece.strip() for piece in part.partition("-"))
        if _is_number(first) and (not last or _is_number(last)):
            numbers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(numbers))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= _MAX


def format_cpu_list(numbers: Collection[int]) -> str:
    """Return the shortest way to write `numbers`: "0-3,8"; "" for none."""
    parts: list[str] = []
    for _, run in groupby(enumerate(sorted(set(numbers))), lambda one: one[1] - one[0]):
        (_, first), *others = run
        parts.append(f"{first}-{others[-1][1]}" if others else str(first))
    return ",".join(parts)
