"""Tests keys that arrive in one read while a screen opens or the focus moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar

import pytest
from textual import events
from textual.app import ComposeResult
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.widgets import Input, Static

from cpuchat.session.conversation import Conversation
from cpuchat.tui.app import ChatApp
from cpuchat.tui.chat.chat_list import Chats
from cpuchat.tui.hardware.screen import HardwareScreen
from cpuchat.tui.models.downloads import DownloadsScreen
from cpuchat.tui.models.screen import ModelsScreen
from cpuchat.tui.settings import SettingsScreen
from cpuchat.tui.terminal import driver
from cpuchat.tui.widgets.prompt import PromptInput
from tests.support.chat_app import RunningApp, running
from tests.support.comparing import comparing


def two_chats(conversation: Conversation) -> None:
    store = conversation.history.store
    for title in ("About apples", "About pears"):
        chat = store.create_chat("tiny", title=title)
        store.add_message(chat.id, "user", f"{title}?")
        store.add_message(chat.id, "assistant", "They are fruit.", model="tiny")


def models(app: ChatApp) -> ModelsScreen:
    return ModelsScreen(app.services)


def settings(app: ChatApp) -> SettingsScreen:
    return SettingsScreen(app.services, app.available_themes)


def downloads(app: ChatApp) -> DownloadsScreen:
    return DownloadsScreen(app.services)


def hardware(app: ChatApp) -> HardwareScreen:
    return HardwareScreen(app.services)


async def type_at_once(run: RunningApp, field: Input | PromptInput, *keys: str) -> None:
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
        prompt = run.screen.query_one(PromptInput)
        await type_at_once(run, prompt, "n", *"And")
        assert prompt.text == "And"
        await type_at_once(run, prompt, "escape", "n", "!")
        assert prompt.text == "And!"


async def test_text_after_keys_of_the_chat_goes_where_they_lead() -> None:
    async with running(prepare=two_chats) as run:
        await run.ready()
        search, chats = run.chat.query_one("#chat-search", Input), run.chat.query_one(Chats)

        async def in_the_list() -> None:
            chats.focus()
            await run.until(lambda: chats.has_focus)

        await in_the_list()
        await type_at_once(run, search, "slash", *"and")
        assert search.value == "and"
        await run.press("escape")
        for title, chosen in (("About pears", ("home",)), ("About apples", ("end",))):
            await in_the_list()
            await type_at_once(run, run.prompt, *chosen, "enter", *"drop")  # d deletes in the list, r renames
            assert run.prompt.text == "drop"
            assert run.conversation.chat is not None and run.conversation.chat.title == title
            run.prompt.clear()

        for is_pasted in (False, True):  # a hit of the search
            search.focus()
            search.value = "apples"
            await run.until(lambda: any("/" in (option.id or "") for option in chats.options))
            for key in ("enter", "enter", *([] if is_pasted else "And pears?")):
                run.app.simulate_key(key)
            if is_pasted:
                run.app.post_message(events.Paste("And pears?"))
            await run.until(lambda: run.prompt.text == "And pears?")
            assert run.conversation.chat is not None and run.conversation.chat.title == "About apples"
            run.prompt.clear()

        run.transcript.focus()  # what is no key of the transcript
        await run.until(lambda: run.transcript.has_focus)
        run.app.post_message(events.Paste("one "))
        await run.until(lambda: run.prompt.text == "one ")
        run.transcript.focus()
        await run.until(lambda: run.transcript.has_focus)
        await type_at_once(run, run.prompt, "k", *"two")  # k selects the message above
        assert run.prompt.text == "one two"

        await in_the_list()
        for key in ("end", "r", *"Fruit", "enter"):  # goes into the dialog
            run.app.simulate_key(key)
        store = run.conversation.history.store
        await run.until(lambda: "Fruit" in [chat.title for chat in store.chats()])


class Asking(Screen[None]):
    BINDINGS: ClassVar = [("down", "mark", "mark")]

    def __init__(self) -> None:
        super().__init__()
        self.opens = asyncio.Event()

    async def _compose(self) -> None:
        await self.opens.wait()
        await super()._compose()

    def compose(self) -> ComposeResult:
        yield Static("before")

    def action_mark(self) -> None:
        self.query_one(Static).update("after")


async def test_a_key_waits_for_a_screen_that_something_else_opens_just_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as run:
        await run.ready()
        asking = Asking()
        emptied = driver._emptied

        async def open_meanwhile(node: MessagePump) -> None:
            if node is run.prompt and asking not in run.app.screen_stack:
                run.app.push_screen(asking)
            elif node is asking:
                asking.opens.set()
            await emptied(node)

        monkeypatch.setattr(driver, "_emptied", open_meanwhile)
        run.app.simulate_key("down")
        try:
            await run.until(lambda: run.app.screen is asking and "after" in run.screen_text)
        finally:
            asking.opens.set()


async def test_a_screen_can_be_left_while_it_opens_and_text_after_the_key_that_opens_it_goes_there() -> None:
    make: Callable[[ChatApp], Screen[object]]
    async with running() as run:
        await run.ready()
        for key in ("h", "i", "ctrl+o", *"tiny"):
            run.app.simulate_key(key)
        run.app.post_message(events.Paste(" one"))
        await run.until(lambda: isinstance(run.app.screen, ModelsScreen) and run.app.screen.query(Input))
        await run.until(lambda: run.app.screen.query_one(Input).value == "tiny one")
        assert run.prompt.text == "hi"
        run.app.screen.dismiss(None)
        await run.closes()
        for make, turns in (
            (models, 0), (models, 2), (models, 9), (downloads, 0), (downloads, 9), (hardware, 0), (hardware, 2),
            (settings, 2),
        ):  # fmt: skip
            screen = make(run.app)
            run.app.push_screen(screen)
            for _ in range(turns):  # of the event loop
                await asyncio.sleep(0)
            screen.dismiss(None)
            await run.until(lambda: run.app.screen is run.chat)
            assert run.app._exception is None, (make, turns)
