"""Paints what has changed, row by row.

Textual's compositor has every widget that meets the box around all changes render all its lines. Beside a model that
computes on every core, this costs more than anything else the app does. Here a row is rendered only where it changed,
and only by the widgets that are in front there.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import textual
from rich.console import Console
from textual._compositor import Compositor, CompositorUpdate
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, TextArea

KNOWN = "8.2."
"""Textual versions whose compositor this relies on (`_dirty_regions`, `cuts`, `layers_visible`); others paint
themselves."""

_Piece = tuple[Widget, Region, int, int, int]  # widget, where it is, and row, first column and end of what it paints


class Rows(CompositorUpdate):
    """Strips to write, each with its column and row."""

    def __init__(self, strips: Sequence[tuple[int, int, Strip]]) -> None:
        self._strips = strips

    def render_segments(self, console: Console) -> str:
        return "".join([f"\x1b[{y + 1};{x + 1}H{strip.render(console)}" for x, y, strip in self._strips])


class Painter(Compositor):
    """A compositor for screens that change a few rows at a time, and often."""

    def render_partial_update(self) -> CompositorUpdate | None:
        if not _is_known():
            return super().render_partial_update()
        screen = self.size.region
        dirty = [region for region in map(screen.intersection, self._dirty_regions) if region]
        self._dirty_regions.clear()
        pieces = [piece for span in self._regions_to_spans(dirty) for piece in self._in_front(*span)]
        ends: dict[Widget, tuple[int, int]] = {}  # first and last row; those between them are cached
        for widget, _, y, _, _ in pieces:
            ends[widget] = (ends[widget][0] if widget in ends else y, y)
        rendered: dict[Widget, list[Strip]] = {}
        strips: list[tuple[int, int, Strip]] = []
        for widget, region, y, start, end in pieces:
            first, last = ends[widget]
            if widget not in rendered:
                lines = Region(0, first - region.y, region.width, last - first + 1)
                rendered[widget] = widget.render_lines(lines)
            strips.append((start, y, rendered[widget][y - first].crop(start - region.x, end - region.x)))
        return Rows(strips) if strips else None

    def _in_front(self, y: int, start: int, end: int) -> Iterator[_Piece]:
        """Cut a row from column `start` to before `end` into what each widget shows of it. Widened to the edges of
        widgets, as Textual does: there no wide character is cut that would not be cut otherwise.
        """
        cuts = self.cuts[y]
        open_parts = [(cuts[bisect_right(cuts, start) - 1], cuts[bisect_left(cuts, end)])]
        for widget, shown, region in self.layers_visible[y]:  # from front to back
            left: list[tuple[int, int]] = []
            for start, end in open_parts:
                first, last = max(start, shown.x), min(end, shown.right)
                if first >= last:
                    left.append((start, end))
                    continue
                yield widget, region, y, first, last
                left += [part for part in ((start, first), (last, end)) if part[0] < part[1]]
            if not left:
                return
            open_parts = left


class TypingScreen(Screen[Any]):
    """A screen that paints what is typed at once. By Textual's timer, a key that comes soon after a paint, as most do
    while an answer streams, waits up to two of its intervals: 66 ms.
    """

    def on_idle(self) -> None:
        field = self.focused
        # When more was typed already, the last of it is painted, or the timer's turn comes.
        if isinstance(field, Input | TextArea) and field in self._dirty_widgets and not self.app.message_queue_size:
            self._on_timer_update()


@functools.cache
def _is_known() -> bool:
    # Not by `textual.__version__`, which imports `importlib.metadata` before the first frame.
    return any(Path(textual.__file__).parent.parent.glob(f"textual-{KNOWN}*.dist-info"))
