"""Tests keys that arrive in one read while a screen opens or the focus moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from textual import events
from textual.screen import Screen
from textual.widgets import Input

from cpuchat.session.conversation import Conversation
from cpuchat.tui.chat.chat_list import Chats
from cpuchat.tui.hardware.screen import HardwareScreen
from cpuchat.tui.models.screen import ModelsScreen
from cpuchat.tui.services import Services
from cpuchat.tui.settings import SettingsScreen
from cpuchat.tui.widgets.prompt import PromptInput
from tests.support.chat_app import RunningApp, running
from tests.support.comparing import comparing


def two_chats(conversation: Conversation) -> None:
    store = conversation.history.store
    for title in ("About apples", "About pears"):
        chat = store.create_chat("tiny", title=title)
        store.add_message(chat.id, "user", f"{title}?")
        store.add_message(chat.id, "assistant", "They are fruit.", model="tiny")


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

        search.focus()  # a hit of the search
        search.value = "apples"
        await run.until(lambda: any("/" in (option.id or "") for option in chats.options))
        for key in ("enter", "enter"):
            run.app.simulate_key(key)
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


async def test_a_screen_can_be_left_while_it_opens_and_text_after_the_key_that_opens_it_goes_there() -> None:
    make: Callable[[Services], Screen[object]]
    async with running() as run:
        await run.ready()
        for key in ("h", "i", "ctrl+o", *"tiny"):
            run.app.simulate_key(key)
        run.app.post_message(events.Paste(" one"))
        await run.opens(ModelsScreen)
        await run.until(lambda: run.app.screen.query_one(Input).value == "tiny one")
        assert run.prompt.text == "hi"
        run.app.screen.dismiss(None)
        await run.closes()
        services = run.app.services
        for make, turns in (
            (ModelsScreen, 0), (ModelsScreen, 2), (ModelsScreen, 9), (HardwareScreen, 0),
            (HardwareScreen, 2), (lambda _: SettingsScreen(services, ()), 2),
        ):  # fmt: skip
            screen = make(services)
            run.app.push_screen(screen)
            for _ in range(turns):  # of the event loop
                await asyncio.sleep(0)
            screen.dismiss(None)
            await run.closes()
