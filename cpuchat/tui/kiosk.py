"""The app in a browser tab: chats and figures, without access to the files and programs of the machine that serves it.

What reads or writes files of the machine, starts programs, downloads or measures is off. The chats of the session are
in its own folder, which is removed at its end.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from textual import messages
from textual.driver import Driver
from textual.drivers.web_driver import WebDriver
from textual.screen import Screen

from cpuchat.config.servers import is_local
from cpuchat.present.chats import Welcome
from cpuchat.tui import keys
from cpuchat.tui.app import ChatApp
from cpuchat.tui.chat.menus import chat_provider
from cpuchat.tui.chat.screen import ChatScreen
from cpuchat.tui.help import MACHINE_TITLE, SPEECH_TITLE
from cpuchat.tui.navigation import Navigator
from cpuchat.tui.widgets.dialogs import Choice, ChoiceScreen

WATCH_VARIABLE = "CPUCHAT_WATCH_URL"
"""The address at which others may watch the session."""

OFF = frozenset({
    "preset", "save_preset", "delete_preset",
    "models", "switch_model", "compare", "compare_with", "downloads", "settings", "hardware", "plan", "tune",
    "suspend_process", "screenshot", "export_chat", "speak", "read_answer", "drafting", "keys", "tour", "tools",
    "tool_servers",
    "forget_approvals",
})  # fmt: skip
"""Actions that are hidden and refused."""
MOVED = {"chat.new": "alt+n,ctrl+n", "chat.color_drafts": "alt+c,ctrl+t", "app.quit": "alt+q,ctrl+q"}
"""Keys of actions whose usual keys most browsers keep for themselves: new window, new tab, quit."""
_HELP = {
    "app.quit": "Quit (deletes the chats of this session)",
    "prompt.complete": "Complete a command (/)",
}
_SHARE = keys.Key("app.share", "", "share", "share", "Share this session (read-only link)", keys.CHATS)

_NO_CLIPBOARD = "Not copied: browsers allow it on https and localhost only. Select with Shift and the mouse."
_PATIENCE_SECONDS = 10.0
"""For an app whose server was killed to leave by itself."""
_PLACES = frozenset({"prompt", "queue", "chat", "app", "transcript", "branches", "chats", "help", "dialog"})


class TabDriver(WebDriver):
    """Draws to a server of web pages on standard output, in packets. Ends the app when the server was killed."""

    def run_input_thread(self) -> None:
        super().run_input_thread()
        if not self.exit_event.is_set():
            assert isinstance(self._app, KioskApp)
            self._app.abandoned = True
            self._app.post_message(messages.ExitApp())
            if not self.exit_event.wait(_PATIENCE_SECONDS):
                os._exit(1)

    def write(self, data: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            super().write(data)

    def write_meta(self, data: dict[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError):
            super().write_meta(data)


class KioskChat(ChatScreen):
    """The chat without what is off."""

    READS_FILES = False

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.COMMANDS = {chat_provider(self.services)}  # pyright: ignore[reportAttributeAccessIssue]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return False if action in OFF else super().check_action(action, parameters)


class KioskApp(ChatApp):
    """See `ChatApp`."""

    CHAT: ClassVar = KioskChat
    HELP_LEFT_OUT: ClassVar = frozenset({MACHINE_TITLE, SPEECH_TITLE})
    abandoned = False
    """The server was killed."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.services.navigation = _Closed(self, self.services)
        self.services.no_model = "No model is loaded. Your next message connects again."
        self.services.first_run = False  # each session has a new folder
        self.services.describe_machine = lambda settings, loaded: Welcome()

    def on_mount(self) -> None:
        self.services.use_keymap(MOVED)

    def tell_copied(self, text: str, what: str) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        link = os.environ.get(WATCH_VARIABLE, "")
        is_refused = urlsplit(link).scheme == "http" and not is_local(link)
        self.notify(_NO_CLIPBOARD if is_refused else f"Copied {what}.", markup=False)

    @property
    def moved_keys(self) -> tuple[keys.Key, ...]:
        moved = (replace(key, help=_HELP.get(key.id, key.help)) for key in super().moved_keys)
        return *moved, _SHARE

    def action_share(self) -> None:
        """Show the link at which others may watch the session, and copy it."""
        link = os.environ.get(WATCH_VARIABLE, "")
        self.copy_to_clipboard(link)
        question = f"Anyone with this link can watch the session:\n\n{link}"
        choices = (Choice("close", "Close"), Choice("open", "Open in a tab"))

        def on_choice(chosen: str | None) -> None:
            if chosen == "open":
                self.open_url(link)

        self.push_screen(ChoiceScreen("Share this session", question, choices), on_choice)

    def get_driver_class(self) -> type[Driver]:
        return TabDriver

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return False if action in OFF else super().check_action(action, parameters)

    def offered_keys(self) -> list[keys.Key]:
        return [key for key in super().offered_keys() if key.place in _PLACES and key.action not in OFF]


class _Closed(Navigator):
    """Opens nothing: also what no key or command asks for."""

    async def result_of(self, screen: Screen[Any]) -> None:
        self.show(screen)

    def show(self, screen: Screen[Any]) -> None:
        self._app.notify("Not available in the browser.", severity="warning")
