"""The program with faults that cannot be made otherwise: `break WHERE` raises there, SIGUSR1 in a callback."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from textual.app import RenderResult
from textual.screen import Screen

from cpuchat.cli.main import main
from cpuchat.session.conversation import Conversation
from cpuchat.session.events import MessageSent, SessionEvent
from cpuchat.tui.chat.screen import ChatScreen
from cpuchat.tui.chat.status import StatusLine


class Fault(Exception):
    pass


def fail(*_: object) -> Any:
    raise Fault("made by a test")


async def fail_later() -> None:
    fail()


class BadStyles(Screen[None]):
    CSS = "Screen { color: nothing-like-a-color; ] }"


def in_render(screen: ChatScreen) -> None:
    def render(self: StatusLine) -> RenderResult:
        return fail()

    StatusLine.render = render  # type: ignore[method-assign]
    screen.query_one(StatusLine).refresh()


def while_leaving(screen: ChatScreen) -> None:
    async def close(self: Conversation) -> None:
        await right(self)
        fail()

    right = Conversation.close
    screen.query_one(StatusLine).show_state("fails when left")
    Conversation.close = close  # type: ignore[method-assign]


def for_ever(screen: ChatScreen) -> None:
    def stand_still() -> None:
        while True:
            pass

    screen.query_one(StatusLine).show_state("stuck now")
    screen.set_timer(0.5, stand_still)  # after that was drawn


FAULTS: dict[str, Callable[[ChatScreen], object]] = {
    "handler": fail,
    "worker": lambda screen: screen.run_worker(fail_later()),
    "thread": lambda screen: threading.Thread(target=fail).start(),
    "render": in_render,
    "styles": lambda screen: screen.app.push_screen(BadStyles()),
    "leaving": while_leaving,
    "loop": for_ever,
}


def break_on_command() -> None:
    right = ChatScreen._follow

    def follow(self: ChatScreen, event: SessionEvent) -> object:
        command, _, where = event.message.text.partition(" ") if isinstance(event, MessageSent) else ("", "", "")
        return FAULTS[where](self) if command == "break" else right(self, event)

    ChatScreen._follow = follow  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    break_on_command()
    signal.signal(signal.SIGUSR1, lambda *_: asyncio.get_running_loop().call_soon_threadsafe(fail))
    sys.exit(main())
