"""Waiting until an app rests, however busy the machine is: counts messages, where Textual measures CPU time.

Nobody sees a headless screen, and drawing it costs most: it is drawn when a test looks at it, and once to see that it
can be."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import pytest
import textual.app
import textual.pilot
from textual.app import App
from textual.message import Message
from textual.message_pump import MessagePump
from textual.screen import Screen

_WINDOW_SECONDS = 0.02
_WINDOWS = 50
"""Something may go on for ever, such as figures that are shown as they change."""
_TURNS = 5
"""Of the event loop: what came due during the window passes on its messages in these, also after a stall."""
_dispatch = MessagePump._dispatch_message
_dispatched = 0
_draw = Screen._compositor_refresh
_undrawn: weakref.WeakSet[Screen[Any]] = weakref.WeakSet()
_drawn: weakref.WeakSet[Screen[Any]] = weakref.WeakSet()


async def _counted(self: MessagePump, message: Message) -> None:
    global _dispatched
    _dispatched += 1
    await _dispatch(self, message)


def _draw_later(self: Screen[Any]) -> None:
    if self.app.is_headless and self is self.app.screen:
        _undrawn.add(self)
        self._dirty_widgets.clear()
        self.app._update_mouse_over(self)
    else:
        _draw(self)


def draw(app: App[Any] | None = None) -> None:
    """Draw the screens that opened over others and rest for the first time; all that changed if their app is given."""
    for screen in list(_undrawn):
        if screen.is_running and screen is screen.app.screen and screen.app in (app, *_hosts(screen)):
            with screen.app._context():
                _draw(screen)
            _drawn.add(screen)
            _undrawn.discard(screen)


def _hosts(screen: Screen[Any]) -> list[App[Any]]:
    return [screen.app] if screen not in _drawn and len(screen.app.screen_stack) > 1 else []


async def wait_for_idle(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Wait until no message passed through an app for a while. A process that gets no CPU is not idle."""
    for _ in range(_WINDOWS):
        before = _dispatched
        await asyncio.sleep(_WINDOW_SECONDS)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if _dispatched == before:
            break
    draw()


def draw_at_once(patch: pytest.MonkeyPatch) -> None:
    """Let screens be drawn whenever they change, as in a terminal."""
    patch.setattr(Screen, "_compositor_refresh", _draw)


def install() -> None:
    """Let `Pilot` wait so, and longer than 30 s for a screen."""
    MessagePump._dispatch_message = _counted  # type: ignore[method-assign]
    Screen._compositor_refresh = _draw_later  # type: ignore[method-assign]
    textual.app.wait_for_idle = textual.pilot.wait_for_idle = wait_for_idle  # type: ignore[attr-defined]
    textual.pilot.Pilot._wait_for_screen.__defaults__ = (180.0,)  # type: ignore[attr-defined]
