"""Waiting until an app rests, however busy the machine is: counts messages, where Textual measures CPU time."""

from __future__ import annotations

import asyncio

import textual.app
import textual.pilot
from textual.message import Message
from textual.message_pump import MessagePump

_WINDOW_SECONDS = 0.02
_WINDOWS = 50
"""Something may go on for ever, such as figures that are shown as they change."""
_TURNS = 5
"""Of the event loop: what came due during the window passes on its messages in these, also after a stall."""
_dispatch = MessagePump._dispatch_message
_dispatched = 0


async def _counted(self: MessagePump, message: Message) -> None:
    global _dispatched
    _dispatched += 1
    await _dispatch(self, message)


async def wait_for_idle(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Wait until no message passed through an app for a while. A process that gets no CPU is not idle."""
    for _ in range(_WINDOWS):
        before = _dispatched
        await asyncio.sleep(_WINDOW_SECONDS)
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        if _dispatched == before:
            break


def install() -> None:
    """Let `Pilot` wait so, and longer than 30 s for a screen."""
    MessagePump._dispatch_message = _counted  # type: ignore[method-assign]
    textual.app.wait_for_idle = textual.pilot.wait_for_idle = wait_for_idle  # type: ignore[attr-defined]
    textual.pilot.Pilot._wait_for_screen.__defaults__ = (180.0,)  # type: ignore[attr-defined]
