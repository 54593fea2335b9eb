"""The app in a browser tab of someone else: chatting and its figures, and nothing of the machine that serves it.

What reads or writes files of the machine, starts programs, downloads or measures is off. The chats of the session are
in its own folder, which is removed at its end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App
from textual.driver import Driver

from cpuchat.servers import Source
from cpuchat.settings import Settings
from cpuchat.tui.app import ChatApp
from cpuchat.tui.chat.screen import ChatScreen

OFF = frozenset({
    "models", "compare", "compare_with", "downloads", "settings", "hardware", "plan", "tune", "suspend_process",
    "screenshot", "export_chat", "speak", "read_answer", "drafting",
})  # fmt: skip
"""Actions that are hidden and refused."""


class KioskChat(ChatScreen):
    """The chat without what is off."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.COMMANDS = {provider for provider in self.COMMANDS if "Model" not in provider.__name__}  # type: ignore

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return False if action in OFF else super().check_action(action, parameters)


class KioskApp(ChatApp):
    """See `ChatApp`; draws to a server of web pages on standard output, in packets."""

    CHAT: ClassVar = KioskChat

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.services.navigation = _Closed(self)

    def get_driver_class(self) -> type[Driver]:
        from textual.drivers.web_driver import WebDriver

        return WebDriver

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return False if action in OFF else super().check_action(action, parameters)


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
