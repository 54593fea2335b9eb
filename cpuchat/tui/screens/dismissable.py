"""Screens that can be dismissed once."""

from __future__ import annotations

from textual.await_complete import AwaitComplete
from textual.screen import Screen, ScreenResultType


class Dismissable(Screen[ScreenResultType]):
    """Textual pops whatever is on top, also for a screen that is gone already or lies below a dialog: two presses of a
    key that arrive together would take the screen below along, whose caller then waits for ever."""

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        return super().dismiss(result) if self.is_active else AwaitComplete.nothing()
