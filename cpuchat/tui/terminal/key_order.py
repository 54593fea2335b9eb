"""Makes keys take effect in the order in which they were typed, also when many arrive in one read (a paste, a slow
link).

Textual hands characters to the focused widget, but acts on bound keys in the app: at once for priority bindings, and
only after the key has climbed the tree for the others. Enter then overtakes the text before it, and Backspace is
overtaken by the text after it. What follows a key that opens a screen would go to the screen below, or to one that has
no widgets yet; what follows a key that moves the focus, to the widget that had it before. Some keys act by a message to
the screen, or only after something was read (a chat, say): what follows waits for that, too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

from textual import events
from textual.app import App
from textual.dom import DOMNode
from textual.message_pump import Callback, MessagePump
from textual.screen import Screen
from textual.widgets import Input, TextArea

Result = TypeVar("Result")
_PATIENCE = 1.0  # s; only if a widget waits for the app itself, which it must not
_HELD_PATIENCE = 5.0  # s; for a disk that is slow


class OrderedKeys(App[Result]):
    """An app that handles a bound key only after its widgets have processed everything typed before, and at once with
    all that follows from it; and a screen's keys only after it has opened.

    Text that is no key on a screen with a `TEXT_FIELD` (a selector) goes there.
    """

    _open: Screen[object] | None = None
    _acting = False
    _acted_on: DOMNode | None = None  # by the key before, which may have sent messages
    _n_holds = 0

    def __init__(self) -> None:
        super().__init__()
        self._released = asyncio.Event()

    @contextlib.contextmanager
    def keys_held(self) -> Iterator[None]:
        """Inside, what is typed waits: it is meant for what is being opened."""
        self._n_holds += 1
        self._released.clear()
        try:
            yield
        finally:
            self._n_holds -= 1
            if not self._n_holds:
                self._released.set()

    def call_later(self, callback: Callback, *args: Any, **kwargs: Any) -> bool:
        """Call after what is queued, but before the next key if it follows from one: `Widget.focus` waits here."""
        if not self._acting:
            return super().call_later(callback, *args, **kwargs)
        self.call_next(callback, *args, **kwargs)
        return True

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            is_text = isinstance(event, events.Paste) or event.is_printable
            if await self._opened() and is_text:  # typed before anything was shown that has keys of its own
                self._focus_text_field()
            if isinstance(event, events.Key) and await self._acted(event):
                return
            if is_text and (isinstance(event, events.Paste) or event.key != "space"):
                self._focus_text_field()
        await super().on_event(event)

    async def _opened(self) -> bool:
        """Wait until the screen on top has its widgets and its focus; return whether keys were held for that."""
        if (node := self._acted_on) is not None:
            self._acted_on = None
            await self._follow(_settled(node))
        await asyncio.sleep(0)  # a screen that gives an answer is opened by a worker, in its first step
        if held := self._n_holds > 0:
            await self._follow(self._all_released(), _HELD_PATIENCE)
        while (screen := self.screen) is not self._open:
            await _patiently(_emptied(screen))
            self._open = screen
        return held

    async def _follow(self, wait: Awaitable[None], limit: float = _PATIENCE) -> None:
        """Wait for what follows from the key before, with what that calls later in this app: the focus, for example."""
        self._acting = True
        try:
            await _patiently(wait, limit)
        finally:
            self._acting = False
        await self._flush_next_callbacks()

    async def _all_released(self) -> None:
        while self._n_holds:
            await self._released.wait()

    def _focus_text_field(self) -> None:
        selector: str = getattr(self.screen, "TEXT_FIELD", "")
        if selector and not isinstance(self.focused, Input | TextArea):
            self.screen.set_focus(self.screen.query_one(selector))

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
            acted = await self._check_bindings(event.key, priority=True)
            if not acted and not (isinstance(focused, TextArea) and event.key == "enter"):  # a line break, no binding
                acted = await self._check_bindings(event.key)
        finally:
            self._acting = False
        self._acted_on = focused if acted else None
        return acted


async def _patiently(wait: Awaitable[None], limit: float = _PATIENCE) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(wait, limit)


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
