"""Makes keys take effect in the order in which they were typed, also when many arrive in one read (a paste, a slow
link).

Textual hands characters to the focused widget, but acts on bound keys in the app: at once for priority bindings, and
only after the key has climbed the tree for the others. Enter then overtakes the text before it, and Backspace is
overtaken by the text after it. What follows a key that opens a screen would go to the screen below, or to one that has
no widgets yet; what follows a key that moves the focus, to the widget that had it before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar

from textual import events
from textual.app import App
from textual.dom import DOMNode
from textual.message_pump import Callback, MessagePump
from textual.screen import Screen
from textual.widgets import Input, TextArea

Result = TypeVar("Result")
_PATIENCE = 1.0  # s; only if a widget waits for the app itself, which it must not


class OrderedKeys(App[Result]):
    """An app that handles a bound key only after its widgets have processed everything typed before, and at once with
    all that follows from it; and a screen's keys only after it has opened.
    """

    _open: Screen[object] | None = None
    _acting = False

    def call_later(self, callback: Callback, *args: Any, **kwargs: Any) -> bool:
        """Call after what is queued, but before the next key if it follows from one: `Widget.focus` waits here."""
        if not self._acting:
            return super().call_later(callback, *args, **kwargs)
        self.call_next(callback, *args, **kwargs)
        return True

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            await self._opened()
            if isinstance(event, events.Key) and await self._acted(event):
                return
        await super().on_event(event)

    async def _opened(self) -> None:
        """Wait until the screen on top has its widgets and its focus."""
        await asyncio.sleep(0)  # a screen that gives an answer is opened by a worker, in its first step
        while (screen := self.screen) is not self._open:
            await _patiently(_emptied(screen))
            self._open = screen

    async def _acted(self, event: events.Key) -> bool:
        """Run what `event` is bound to; False leaves the key to Textual."""
        focused = self.focused
        if event.is_printable and isinstance(focused, Input | TextArea):
            return False
        if not self.app_focus:  # this key brings the focus back
            return False
        await _patiently(_settled(self.screen if focused is None else focused))
        if event.key == "escape":
            self.screen.clear_selection()  # as screens do when the key has climbed to them
        self._acting = True
        try:
            if await self._check_bindings(event.key, priority=True):
                return True
            inserted = isinstance(focused, TextArea) and event.key == "enter"  # a line break, no binding
            return not inserted and await self._check_bindings(event.key)
        finally:
            self._acting = False


async def _patiently(wait: Awaitable[None]) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(wait, _PATIENCE)


async def _settled(focused: DOMNode) -> None:
    """Wait until `focused`, and all that it tells of changes up to its screen, has seen what it was sent before."""
    await _emptied(focused)  # the keys themselves
    for node in focused.ancestors_with_self:  # "changed" climbs from the widget to who listens
        if isinstance(node, App):
            break
        await _emptied(node)


async def _emptied(node: MessagePump) -> None:
    done = asyncio.Event()
    if node.call_later(done.set):
        await done.wait()
