"""Tests keys that arrive in one read while a screen opens or the focus moves."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from textual import events
from textual.screen import Screen
from textual.widgets import Input

from cpuchat.tui.app import ChatApp
from cpuchat.tui.chat.chat_list import Chats
from cpuchat.tui.hardware.screen import HardwareScreen
from cpuchat.tui.models.downloads.screen import DownloadsScreen
from cpuchat.tui.models.screen import ModelsScreen
from cpuchat.tui.settings.screen import SettingsScreen
from cpuchat.tui.widgets.prompt import Prompt
from tests.support.chat_app import RunningApp, running
from tests.support.comparing import comparing


def models(app: ChatApp) -> ModelsScreen:
    return ModelsScreen(app.services)


def settings(app: ChatApp) -> SettingsScreen:
    return SettingsScreen(app.services, app.available_themes)


def downloads(app: ChatApp) -> DownloadsScreen:
    return DownloadsScreen(app.services)


def hardware(app: ChatApp) -> HardwareScreen:
    return HardwareScreen(app.services)


async def test_text_after_a_key_that_opens_a_screen_goes_there() -> None:
    async with running() as run:
        await run.ready()
        for key in ("h", "i", "ctrl+o", *"tiny"):
            run.app.simulate_key(key)
        run.app.post_message(events.Paste(" one"))
        await run.until(lambda: isinstance(run.app.screen, ModelsScreen) and run.app.screen.query(Input))
        await run.until(lambda: run.app.screen.query_one(Input).value == "tiny one")
        assert run.prompt.text == "hi"


async def type_at_once(run: RunningApp, field: Input | Prompt, *keys: str) -> None:
    """Queue these keys, and wait until `field`, which one of them focuses, has those that went there."""
    forwarded = asyncio.Event()
    for key in keys:
        run.app.simulate_key(key)
    run.app.post_message(events.Callback(forwarded.set))  # behind them
    await forwarded.wait()
    await run.until(lambda: field.has_focus)


async def test_text_after_a_key_that_moves_the_focus_goes_there() -> None:
    async with comparing() as run:
        await run.done()
        prompt = run.screen.query_one(Prompt)
        await type_at_once(run, prompt, "n", *"And")
        assert prompt.text == "And"
        await type_at_once(run, prompt, "escape", "n", "!")
        assert prompt.text == "And!"


async def test_text_after_the_key_of_the_search_is_searched_for() -> None:
    async with running() as run:
        await run.ready()
        chats = run.chat.query_one(Chats)
        chats.focus()
        await run.until(lambda: chats.has_focus)
        search = run.chat.query_one("#chat-search", Input)
        await type_at_once(run, search, "slash", *"and")
        assert search.value == "and"


async def test_a_screen_can_be_left_while_it_opens() -> None:
    make: Callable[[ChatApp], Screen[object]]
    async with running() as run:
        await run.ready()
        for make, turns in itertools.product((models, settings, downloads, hardware), (0, 2, 9)):
            screen = make(run.app)
            run.app.push_screen(screen)
            for _ in range(turns):  # of the event loop
                await asyncio.sleep(0)
            screen.dismiss(None)
            await run.until(lambda: run.app.screen is run.chat)
            assert run.app._exception is None, (make, turns)
