"""Tests the list of stored chats, and that figures of one are not shown with another."""

from __future__ import annotations

import msgspec
from textual.events import AppFocus
from textual.widgets import Input

from cpuchat.base import paths
from cpuchat.chats.store import ChatStore
from cpuchat.protocol.messages import ModelLoaded
from cpuchat.session.conversation import Conversation
from cpuchat.tui.chat.chat_list import Chats
from cpuchat.tui.chat.reading import ReadingScreen
from cpuchat.tui.widgets.dialogs import AskTextScreen, ConfirmScreen
from tests.support.chat_app import SMALL, RunningApp, loaded, running, three_chats
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, answer, timings

SLOWER = msgspec.structs.replace(timings(7), predicted_ms=300.0)


def titles(app: RunningApp) -> list[str]:
    return [str(option.prompt).strip(" ▌") for option in app.chat.query_one(Chats).options]


def marked(app: RunningApp) -> str | None:
    """Return the title of the chat that `d` would delete."""
    chat_id = app.chat.query_one(Chats).marked
    return app.conversation.history.store.chat(chat_id).title if chat_id else None


async def test_other_chats_are_read_while_a_model_loads() -> None:
    gate = Gate()
    backend = ScriptedBackend(load_steps=[gate, ModelLoaded(model=MODEL)])
    async with running(backend, prepare=three_chats) as app:
        await app.until(gate.reached.is_set)
        regex, toml, _ = sorted(app.conversation.history.store.chats(), key=lambda chat: chat.title)
        app.chat.commands.open(regex.id)
        await app.until(lambda: app.contents() == ["About Regex for dates"])
        await app.send("Queued here", wait=False)
        app.chat.commands.open(toml.id)  # what is queued stays with its chat
        await app.until(lambda: app.contents() == ["About TOML schema"])
        assert app.prompt.text == "" and any("not sent" in notice for notice in app.notices)
        await app.press("f4")  # a message can be edited meanwhile, and be sent when the model is there
        await app.press("?", "enter")
        assert not backend.requests
        gate.open()
        await app.idle(1)
        assert [content for _, content in app.stored()] == ["About TOML schema?", "Hello there."]
        app.chat.commands.open(regex.id)
        await app.until(lambda: app.prompt.text == "Queued here")


async def test_what_another_window_wrote_is_listed_when_the_list_or_the_terminal_is_looked_at() -> None:
    async with loaded(prepare=three_chats) as app:
        other = ChatStore(paths.chats_db())
        other.create_chat("m", title="Fourth")
        await app.press("f8", "f8")
        await app.until(lambda: "Fourth" in titles(app))
        other.create_chat("m", title="Fifth")
        app.app.post_message(AppFocus())
        await app.until(lambda: "Fifth" in titles(app))
        other.close()


async def test_chats_are_searched_opened_and_left_and_the_open_one_is_marked() -> None:
    gate = Gate()
    async with loaded(ScriptedBackend([answer("One two", gate=gate)]), prepare=three_chats) as app:
        options, search = app.chat.query_one(Chats), app.chat.query_one("#chat-search", Input)
        everything = titles(app)
        assert everything == ["Today", "What is a [roofline]?", "TOML schema", "Regex for dates"]
        for leave in (("enter", "enter"), ("down", "enter"), ("ctrl+n",), ("escape",)):
            options.focus()
            await app.press("slash", *"toml")
            await app.until(lambda: [one.id for one in options.options if one.id and "/" in one.id])
            assert "Regex" not in app.screen_text
            await app.press(*leave)
            await app.until(lambda: titles(app) == everything)
            assert search.value == ""
            if leave[-1] == "enter":
                assert app.contents() == ["About TOML schema"] and app.app.focused is app.transcript
                assert marked(app) == "TOML schema"
            elif leave == ("ctrl+n",):
                assert app.conversation.chat is None and not app.contents() and marked(app) is None
                await app.press(*(["f8"] * (1 + app.chat.has_class("-wide"))), "enter")  # the first one
                await app.until(lambda: marked(app) == "What is a [roofline]?")

        options.focus()
        await app.press("home", "enter")
        await app.until(lambda: marked(app) == "What is a [roofline]?")
        options.focus()
        await app.press("down")  # the mark moves freely only while the list is used
        assert marked(app) == "TOML schema"
        await app.press("r")
        await app.opens(AskTextScreen)
        await app.press("escape")
        assert marked(app) == "TOML schema"  # a dialog is not leaving
        await app.press("escape")
        assert app.app.focused is app.prompt and marked(app) == "What is a [roofline]?"

        await app.press("ctrl+n")
        await app.count_up_to(gate)
        assert marked(app) == "Count"
        app.chat.commands.open(app.conversation.history.store.chats()[-1].id)
        await app.opens(ReadingScreen)
        await app.shows("answer being written · Count")
        assert app.contents()[0] == "Count"
        await app.press("enter")
        await app.told("go on in this chat when the answer is done")
        gate.open()
        await app.shows("answer done · Count")
        await app.press("enter")
        await app.closes()
        await app.until(lambda: app.contents()[:1] != ["Count"])


async def test_chats_are_renamed_and_deleted() -> None:
    async with loaded(prepare=three_chats) as app:
        options = app.chat.query_one(Chats)
        options.focus()
        await app.press("end", "r")
        await app.opens(AskTextScreen)
        await app.press("end", *" now", "enter")
        await app.until(lambda: "Regex for dates now" in titles(app))
        options.focus()
        await app.press("end", "d")
        await app.opens(ConfirmScreen)
        await app.press("enter")  # the safe answer has the focus
        await app.closes()
        assert len(app.conversation.history.store.chats()) == 3
        await app.press("d")
        await app.confirm()
        await app.until(lambda: len(app.conversation.history.store.chats()) == 2)


async def test_a_chat_that_another_window_changed_is_loaded_again_and_the_text_stays() -> None:
    async with loaded() as app:
        await app.send("Hello")
        other = ChatStore(paths.chats_db())
        other.add_message(app.open_chat.id, "user", "From the other window")
        other.close()
        await app.run("More")
        await app.until(lambda: len(app.transcript.messages) == 4 and not app.chat.session.busy)
        assert app.prompt.text == "More"
        shown = app.contents()
        assert shown[:3] == ["Hello", "Hello there.", "From the other window"]
        assert "another window" in shown[3]
        await app.press("enter")
        await app.until(lambda: app.stored()[-1] == ("assistant", "Hello there."))
        assert [content for _, content in app.stored()] == [*shown[:3], "More", "Hello there."]


def two_chats(conversation: Conversation) -> None:
    """Store two chats: “About apples”, the older one, and “About pears”."""
    store = conversation.history.store
    for title in ("About apples", "About pears"):
        chat = store.create_chat(MODEL.name, title=title)
        store.add_message(chat.id, "user", f"{title}?")
        told = store.add_message(chat.id, "assistant", "They are fruit.", model=MODEL.name)
        store.update_message(
            told.id, content=told.content, reasoning="", stop_reason="end", timings=SLOWER, model=MODEL.name
        )


async def open_chat(app: RunningApp, title: str) -> None:
    chats = app.conversation.history.store.chats()
    await app.chat.commands.open(next(chat.id for chat in chats if chat.title == title)).wait()
    await app.pilot.pause()


async def test_figures_of_another_chat_are_not_shown() -> None:
    gate = Gate()
    backend = ScriptedBackend(load_steps=[gate, ModelLoaded(model=MODEL)])
    async with running(backend, prepare=two_chats, size=SMALL) as app:
        await app.until(gate.reached.is_set)
        await open_chat(app, "About pears")  # before the model is loaded
        gate.open()
        await app.ready()
        await app.shows("49/8k")
        await app.press("ctrl+n")
        await app.send("A question")
        assert app.conversation.figures().decode_tok_s.value is not None
        assert "40.0" in app.screen_text
        await open_chat(app, "About apples")
        figures = app.conversation.figures()
        assert figures.decode_tok_s.value is figures.ttft_s.value is None and figures.history == ()
        assert figures.n_past.value == SLOWER.n_past
        assert "40.0" not in app.screen_text
        assert "49/8k" in app.screen_text
        await app.press("ctrl+n")
        assert app.conversation.figures().n_past.value == 0
        assert "0/8k" in app.screen_text
