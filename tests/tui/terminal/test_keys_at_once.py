"""Tests keys that arrive in one read while a screen opens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from textual import events
from textual.screen import Screen
from textual.widgets import Input

from cpuchat.tui.app import ChatApp
from cpuchat.tui.hardware.screen import HardwareScreen
from cpuchat.tui.models.downloads.screen import DownloadsScreen
from cpuchat.tui.models.screen import ModelsScreen
from cpuchat.tui.settings.screen import SettingsScreen
from tests.support.chat_app import running


def models(app: ChatApp) -> ModelsScreen:
    return ModelsScreen(app.services)


def settings(app: ChatApp) -> SettingsScreen:
    return SettingsScreen(app.services, app.available_themes)


async def test_text_after_a_key_that_opens_a_screen_goes_there() -> None:
    async with running() as run:
        await run.ready()
        for key in ("h", "i", "ctrl+o", *"tiny"):
            run.app.simulate_key(key)
        run.app.post_message(events.Paste(" one"))
        await run.until(lambda: isinstance(run.app.screen, ModelsScreen) and run.app.screen.query(Input))
        await run.until(lambda: run.app.screen.query_one(Input).value == "tiny one")
        assert run.prompt.text == "hi"


@pytest.mark.parametrize("make", [
    models, settings, lambda app: DownloadsScreen(app.services), lambda app: HardwareScreen(app.services),
], ids=["models", "settings", "downloads", "hardware"])  # fmt: skip
async def test_a_screen_can_be_left_while_it_opens(make: Callable[[ChatApp], Screen[object]]) -> None:
    async with running() as run:
        await run.ready()
        for turns in (0, 2, 9):
            screen = make(run.app)
            run.app.push_screen(screen)
            for _ in range(turns):  # of the event loop
                await asyncio.sleep(0)
            screen.dismiss(None)
            await run.until(lambda: run.app.screen is run.chat)
        assert run.app._exception is None
