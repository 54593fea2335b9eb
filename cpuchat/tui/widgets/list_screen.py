"""Bases of screens with a list and details of the selected line."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import BindingType
from textual.screen import ScreenResultType

from cpuchat.tui import keys
from cpuchat.tui.widgets.dismissable import Dismissable
from cpuchat.tui.widgets.labelled import Labelled
from cpuchat.tui.widgets.model_list import ModelList

_WIDE = 100  # cells


class DetailsScreen(Dismissable[ScreenResultType]):
    """A screen with keys that scroll its `Labelled`, which never has the focus."""

    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("details")

    def action_scroll_details(self, lines: int) -> None:
        self.query_one(Labelled).scroll_relative(y=lines, animate=False)


class ListScreen(DetailsScreen[ScreenResultType]):
    """A screen with keys that move in its `ModelList`, and the class `-narrow` or `-wide` from its first paint on.

    Textual sets the classes of breakpoints only when a screen has been laid out once: its first picture would be that
    of another width.
    """

    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-narrow"), (_WIDE, "-wide")]
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("list")

    def on_compose(self) -> None:
        self.add_class("-wide" if self.app.size.width >= _WIDE else "-narrow")

    def action_move(self, rows: int) -> None:
        self.query_one(ModelList).move(rows)

    def action_page(self, pages: int) -> None:
        self.query_one(ModelList).page(pages)
