"""Screens that can be dismissed once."""

from __future__ import annotations

import asyncio

from textual.await_complete import AwaitComplete
from textual.screen import Screen, ScreenResultType


class Dismissable(Screen[ScreenResultType]):
    """Textual pops whatever is on top, also for a screen that is gone already or lies below a dialog: two presses of a
    key that arrive together would take the screen below along, whose caller then waits for ever."""

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        return super().dismiss(result) if self.is_active else AwaitComplete.nothing()

    async def dismiss_when_on_top(self, result: ScreenResultType) -> None:
        """Dismiss with a result that was waited for: a dialog that the user has opened meanwhile is closed first."""
        while self.is_attached and not self.is_active:
            await asyncio.sleep(0.05)
        self.dismiss(result)
