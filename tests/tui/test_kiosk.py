"""Tests that the app in a browser tab reads no file that a message names, writes none, and starts no program."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.tui import keys
from cpuchat.tui.chat.welcome import COMPARE
from cpuchat.tui.kiosk import OFF, WATCH_VARIABLE, KioskApp
from tests.support.chat_app import running

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Watch:
    """Audits this process: `found` are programs that it started, and files that it wrote outside `folders`."""

    def __init__(self) -> None:
        self.on = False
        self.folders: tuple[str, ...] = ()
        self.found: list[str] = []
        sys.addaudithook(self._see)  # it stays for good

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.on:
            return
        if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pty.spawn", "webbrowser.open"):
            self.found.append(f"{event} {arguments[0]}")
        elif event == "open" and isinstance(arguments[0], str | bytes) and isinstance(arguments[2], int):
            name = os.fsdecode(arguments[0])
            if arguments[2] & _WRITING and not name.startswith((*self.folders, "/dev/", "/proc/")):
                self.found.append(f"open {name}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


async def test_no_key_and_no_command_leaves_the_session(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WATCH_VARIABLE, "http://demo.example/watch/x")
    watch.folders = tuple(map(str, (paths.config_dir(), paths.data_dir(), paths.cache_dir())))
    async with running(kind=KioskApp) as app:
        await app.ready()
        await app.send(COMPARE)  # opens another screen elsewhere
        assert app.backend.requests[-1].messages[-1].content == COMPARE
        await app.send("Is there @LICENSE and @/etc/passwd ?")
        assert app.backend.requests[-1].messages[-1].content == "Is there @LICENSE and @/etc/passwd ?"
        await app.press("f5")  # the page is neither on https nor on localhost
        await app.until(lambda: any("Not copied" in notice for notice in app.notices))
        before = set(Path.cwd().iterdir())
        watch.on = True
        try:
            for key in keys.KEYS:
                if key.place not in ("app", "chat") or key.action in ("quit", "help_quit", "stop"):
                    continue
                node = app.app if key.place == "app" else app.chat
                name = key.action.partition("(")[0]
                await node.run_action(key.action)
                if key.keys and name in OFF:
                    await app.press(key.keys.partition(",")[0])
                while app.app.screen is not app.chat:  # help, palette, dialogs
                    screen = type(app.app.screen).__module__
                    assert screen.startswith(
                        ("cpuchat.tui.help", "cpuchat.tui.commands", "cpuchat.tui.widgets", "textual.")
                    ), (key.id, screen)
                    await app.press("escape")
            await app.app.run_action("command_palette")
            await app.until(lambda: "Share this session" in app.screen_text)
            assert "Show topology" not in app.screen_text and "Choose, download" not in app.screen_text
        finally:
            watch.on = False
        assert watch.found == [] and set(Path.cwd().iterdir()) == before
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat)
        await app.press(*"/share", "enter")
        await app.until(lambda: "http://demo.example/watch/x" in app.screen_text)
        await app.press("enter")
        await app.until(lambda: app.app.screen is app.chat)
        assert app.app.screen.active_bindings["alt+n"].binding.action == "new_chat"  # browsers keep Ctrl+N
        (quit_key,) = (key for key in app.app.offered_keys() if key.id == "app.quit")
        assert quit_key.keys.startswith("alt+q") and "saved" not in quit_key.help
        await app.app.services.navigation.models()
        await app.until(lambda: any("Not available in the browser" in notice for notice in app.notices))
