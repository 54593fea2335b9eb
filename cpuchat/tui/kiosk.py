"""The app in a browser tab of someone else: chatting and its figures, and nothing of the machine that serves it.

What reads or writes files of the machine, starts programs, downloads or measures is off. The chats of the session are
in its own folder, which is removed at its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App
from textual.command import Hit, Hits, Provider
from textual.content import Content
from textual.driver import Driver

from cpuchat.present.welcome import Welcome
from cpuchat.servers import Source
from cpuchat.settings import Settings
from cpuchat.tui import commands, keys
from cpuchat.tui.app import ChatApp
from cpuchat.tui.chat.commands import chat_provider
from cpuchat.tui.chat.screen import ChatScreen

WATCH_VARIABLE = "CPUCHAT_WATCH_URL"
"""The address at which others may watch the session."""

OFF = frozenset({
    "models", "compare", "compare_with", "downloads", "settings", "hardware", "plan", "tune", "suspend_process",
    "screenshot", "export_chat", "speak", "read_answer", "drafting", "complete",
})  # fmt: skip
"""Actions that are hidden and refused."""


_PLACES = frozenset({"prompt", "chat", "app", "transcript", "branches", "chats", "help", "dialog"})


class KioskChat(ChatScreen):
    """The chat without what is off."""

    READS_FILES = False

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.COMMANDS = {chat_provider(self.services)}  # pyright: ignore[reportAttributeAccessIssue]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return False if action in OFF else super().check_action(action, parameters)


class Sharing(Provider):
    """The command that shares the session."""

    _TITLE = "Share this session (copies a read-only link)"

    async def discover(self) -> Hits:
        shown = commands.line(self.app, "", Content(self._TITLE))
        yield commands.Listed(shown, self._share, text=self._TITLE, group=keys.CHATS)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        if (score := matcher.match(self._TITLE)) > 0:
            shown = commands.line(self.app, keys.CHATS, commands.highlighted(matcher, self._TITLE))
            yield Hit(score, shown, self._share, text=self._TITLE)

    def _share(self) -> None:
        link = os.environ.get(WATCH_VARIABLE, "")
        self.app.copy_to_clipboard(link)
        self.app.notify(f"Copied: {link}", timeout=20, markup=False)


class KioskApp(ChatApp):
    """See `ChatApp`; draws to a server of web pages on standard output, in packets."""

    CHAT: ClassVar = KioskChat
    COMMANDS: ClassVar = {commands.Commands, Sharing}

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.services.navigation = _Closed(self)
        self.services.describe_machine = lambda settings, loaded: Welcome()

    def get_driver_class(self) -> type[Driver]:
        from textual.drivers.web_driver import WebDriver

        return WebDriver

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return False if action in OFF else super().check_action(action, parameters)

    def offered_keys(self) -> list[keys.Key]:
        return [key for key in keys.KEYS if key.place in _PLACES and key.action not in OFF]


class _Closed:
    """The app's `services.Navigation`, which opens nothing: also for what no key or command asks for."""

    def __init__(self, app: App[Any]) -> None:
        self._app = app

    def _refuse(self) -> None:
        self._app.notify("Not available in the browser.", severity="warning")

    async def models(self) -> Source | None:
        self._refuse()

    async def repository(self, repo: str, quantization: str = "") -> Path | None:
        self._refuse()

    async def downloads(self) -> Path | None:
        self._refuse()

    async def draft_models(self) -> Path | None:
        self._refuse()

    async def quantize(self, model: Any) -> Path | None:
        self._refuse()

    async def tune(self, model: Path) -> Path | None:
        self._refuse()

    async def settings(self) -> Settings | None:
        self._refuse()

    def inspection(self, title: str, read: Callable[[], Any]) -> None:
        self._refuse()

    def hardware(self) -> None:
        self._refuse()

    def plan(self) -> None:
        self._refuse()

    async def compare(self, sides: Any, prompt: str = "", kept: Any = None) -> None:
        self._refuse()

    async def compare_with(self, model: Path) -> Any:
        self._refuse()
