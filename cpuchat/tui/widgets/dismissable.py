"""Screens that can be dismissed once, and at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from textual.await_complete import AwaitComplete
from textual.screen import Screen, ScreenResultType

from cpuchat.text import clean_line


class Dismissable(Screen[ScreenResultType]):
    """A screen that is dismissed at most once. Textual pops whatever is on top, also for a screen that is gone already
    or lies below a dialog: two presses of a key that arrive together would dismiss the screen below too, whose caller
    then waits forever.

    It also takes the widgets from a screen that is still opening, whose handlers then look for them in vain: such a one
    opens first.
    """

    _is_open = False
    _dismissed: tuple[ScreenResultType | None] | None = None

    def on_mount(self) -> None:
        self.call_after_refresh(self._opened)  # behind what the screen itself does then

    def _opened(self) -> None:
        self._is_open = True
        if self._dismissed is not None:
            self.dismiss(*self._dismissed)

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        if self._is_open and self.is_active:
            return super().dismiss(result)
        if not self._is_open and self._dismissed is None:
            self._dismissed = (result,)
        return AwaitComplete.nothing()

    def action_close(self) -> Awaitable[None] | None:
        """Leave without a result."""
        self.dismiss(None)

    def warn(self, text: str) -> None:
        """Show a warning; `text` may hold anything."""
        self.notify(clean_line(text), severity="warning", markup=False)

    @property
    def has_widgets(self) -> bool:
        """Return whether it is mounted and not removed: results of threads can be shown."""
        return self.is_mounted and self.is_attached and self.is_running

    async def dismiss_when_on_top(self, result: ScreenResultType) -> None:
        """Dismiss with a result that was awaited; a dialog opened meanwhile is closed first."""
        while self.is_attached and not self.is_active:
            await asyncio.sleep(0.05)
        self.dismiss(result)
