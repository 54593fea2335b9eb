"""Paints what has changed, row by row; keeps parsed style sheets, and no widgets that are gone.

Textual's compositor has every widget that meets the box around all changes render all its lines. Beside a model that
computes on every core, this costs more than anything else the app does. Here a row is rendered only where it changed,
and only by the widgets that are in front there.

Textual also parses all sheets again for each screen that brings one of its own; once there are more than 64, for each
new kind of widget, too. It keeps what up to 1,024 widgets had drawn, some 25 MB, because they are keys of a cache. It
matches the selectors of a rule from the app down, though most fail at the widget itself.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import textual
from rich.console import Console
from textual import events
from textual._compositor import Compositor, CompositorUpdate
from textual._styles_cache import StylesCache
from textual.cache import LRUCache
from textual.css import stylesheet
from textual.css.model import RuleSet, Selector
from textual.css.stylesheet import Stylesheet
from textual.dom import DOMNode
from textual.geometry import Offset, Region
from textual.screen import Screen, ScreenResultType
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, TextArea
from textual.widgets._toast import Toast

KNOWN = "8.2."
"""Textual versions whose compositor this relies on (`_dirty_regions`, `cuts`, `layers_visible`); others paint
themselves."""

_Piece = tuple[Widget, Region, int, int, int]  # widget, where it is, and row, first column and end of what it paints


class StripUpdate(CompositorUpdate):
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
        return StripUpdate(strips) if strips else None

    def _in_front(self, y: int, start: int, end: int) -> Iterator[_Piece]:
        """Cut a row from column `start` to before `end` into what each widget shows of it. Widened to the edges of
        widgets, as Textual does: there no wide character is cut that would not be cut otherwise."""
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


def only_current(screen: Screen[Any], event: events.Resize) -> None:
    """Skip a size that the app no longer has. Textual lays out the screen for it and queues it again, because the
    screen was resized: two sizes that are queued at once take turns for ever, and nothing else is done."""
    if event.size != screen.app.size:
        event.prevent_default()


class LeanScreen(Screen[ScreenResultType]):
    """A screen that styles what changed. Textual styles all of it whenever it is shown or another one opens over it,
    and all that surrounds both when the focus moves from one field of a form to the next. It has the classes for its
    size from the first paint on."""

    def on_compose(self) -> None:
        size = self.app.size
        for length, breakpoints in (
            (size.width, self.HORIZONTAL_BREAKPOINTS),
            (size.height, self.VERTICAL_BREAKPOINTS),
        ):
            if names := [name for min_length, name in breakpoints or () if length >= min_length]:
                self.set_class(True, names[-1], update=False)

    def on_resize(self, event: events.Resize) -> None:
        only_current(self, event)

    def on_screen_suspend(self) -> None:
        self._lie(below=True)

    def on_screen_resume(self, event: events.ScreenResume) -> None:
        if not self.stack_updates:  # the first time; its widgets were styled when they were made
            event.refresh_styles = False
            self.app.stylesheet.update_nodes([self])
        self._lie(below=False)

    def get_widget_and_offset_at(self, x: int, y: int) -> tuple[Widget | None, Offset | None]:
        """As Textual's, but for a widget that is gone and still shown: selecting from there would be an error."""
        widget, offset = super().get_widget_and_offset_at(x, y)
        return (widget, offset) if widget is not None and widget.is_attached else (None, None)

    def _lie(self, *, below: bool) -> None:
        self.set_class(below, "-below", update=False)
        for toast in self.query(Toast):
            toast.update_node_styles(animate=False)

    def _update_focus_styles(self, focused: Widget | None = None, blurred: Widget | None = None) -> None:
        """Style what the focus came into and what it left; what holds both stays as it is."""
        paths = [widget.ancestors_with_self if widget is not None else [] for widget in (focused, blurred)]
        both = set(paths[0]).intersection(paths[1])
        nodes: set[DOMNode] = set()
        for path in paths:
            for node in reversed(path):
                if node not in both and node._has_focus_within:
                    nodes.update(node.walk_children(with_self=True))
                    break
        if nodes:
            self.app.stylesheet.update_nodes(nodes, animate=True)


class TypingScreen(LeanScreen[Any]):
    """A screen that paints what is typed at once. By Textual's timer, a key that comes soon after a paint, as most do
    while an answer streams, waits up to two of its intervals: 66 ms."""

    def on_idle(self) -> None:
        field = self.focused
        # When more was typed already, the last of it is painted, or the timer's turn comes.
        if isinstance(field, Input | TextArea) and field in self._dirty_widgets and not self.app.message_queue_size:
            self._on_timer_update()


@functools.cache
def _is_known() -> bool:
    # Not by `textual.__version__`, which imports `importlib.metadata` before the first frame.
    return any(Path(textual.__file__).parent.parent.glob(f"textual-{KNOWN}*.dist-info"))


_Variables = frozenset[tuple[str, str]]

_MAX = 512
"""Sheets to keep: those of all screens and widgets, in some themes."""
parse_rules = Stylesheet._parse_rules
_check: Callable[[list[Selector], list[DOMNode]], bool] = getattr(stylesheet, "_check_selectors")  # noqa: B009
_kept: LRUCache[tuple[object, ...], list[RuleSet]] = LRUCache(_MAX)
_themes: dict[_Variables, _Variables] = {}
_last: tuple[dict[str, str], _Variables] = ({}, frozenset())


def keep() -> None:
    """Keep what is parsed from now on."""
    # The same number without a call of Python: each widget whose styles change has all rules looked up in a set.
    setattr(RuleSet, "__hash__", object.__hash__)  # noqa: B010
    if (colors := getattr(StylesCache.get_inner_outer, "__wrapped__", None)) is not None:
        setattr(StylesCache, "get_inner_outer", classmethod(lru_cache(1024)(colors)))  # noqa: B010
    setattr(Stylesheet, "_parse_rules", _parse_once)  # noqa: B010
    setattr(stylesheet, "_check_selectors", _check_last_first)  # noqa: B010


def _check_last_first(selectors: list[Selector], nodes: list[DOMNode]) -> bool:
    return selectors[-1].check(nodes[-1]) and _check(selectors, nodes)


def _parse_once(self: Stylesheet, css: str, **options: Any) -> list[RuleSet]:
    """Return the rules of a sheet, parsed now or for any app before: nothing changes them later."""
    global _last
    variables = self._variables
    if _last[0] is not variables:  # the same object for the same values, which compares fast
        values = frozenset(variables.items())
        _last = variables, _themes.setdefault(values, values)
    key = (_last[1], css, *options.items())
    if (rules := _kept.get(key)) is None:
        rules = _kept[key] = parse_rules(self, css, **options)
    return rules
