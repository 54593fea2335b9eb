"""Makes keys take effect in the order in which they were typed, also when many arrive in one read (a paste, a slow
link).

Textual hands characters to the focused widget, but acts on bound keys in the app: at once for priority bindings, and
only after the key has climbed the tree for the others. Enter then overtakes the text before it, and Backspace is
overtaken by the text after it. What follows a key that opens a screen would go to the screen below, or to one that has
no widgets yet.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from textual import events
from textual.app import App
from textual.dom import DOMNode
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.widgets import Input, TextArea

Result = TypeVar("Result")
_PATIENCE = 1.0  # s; only if a widget waits for the app itself, which it must not


class OrderedKeys(App[Result]):
    """An app that handles a bound key only after its text fields have processed everything typed before, and a screen's
    keys only after it has opened.
    """

    _open: Screen[object] | None = None

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
        """Run what `event` is bound to while a text field has the focus; False leaves the key to Textual."""
        field = self.focused
        if event.is_printable or not isinstance(field, Input | TextArea):
            return False
        await _patiently(_settled(field))
        if await self._check_bindings(event.key, priority=True):
            return True
        inserted = isinstance(field, TextArea) and event.key == "enter"  # a line break, no binding
        return not inserted and await self._check_bindings(event.key)


async def _patiently(wait: Awaitable[None]) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(wait, _PATIENCE)


async def _settled(field: DOMNode) -> None:
    """Wait until `field`, and all that it tells of changes up to its screen, has seen what it was sent before."""
    await _emptied(field)  # the keys themselves
    for node in field.ancestors_with_self:  # "changed" climbs from the field to who listens
        if isinstance(node, App):
            break
        await _emptied(node)


async def _emptied(node: MessagePump) -> None:
    done = asyncio.Event()
    if node.call_later(done.set):
        await done.wait()
