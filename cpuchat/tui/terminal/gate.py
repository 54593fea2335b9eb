"""Filters every row of every widget between layout and terminal.

Text that was not cleaned (a forgotten name, a library's own widget) cannot control the terminal either.
"""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from cpuchat.text import is_safe, replace_unsafe


class Gate(LineFilter):
    """Replaces control characters by blanks of the same width, so that the layout stays."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        if all(map(_passes, segments)):
            return segments
        return [segment if _passes(segment) else _blanked(segment) for segment in segments]


def _passes(segment: Segment) -> bool:
    text, style, _ = segment
    if not text.isprintable() and ("\n" in text or "\t" in text or not is_safe((text,))):
        return False
    return style is None or style.link is None or (style.link.isprintable() and style.link.isascii())


def _blanked(segment: Segment) -> Segment:
    text = replace_unsafe(segment.text, lambda character: " " * cell_len(character))
    text = text.replace("\n", " " * cell_len("\n")).replace("\t", " " * cell_len("\t"))
    return Segment(text, segment.style.update_link(None) if segment.style is not None else None)
