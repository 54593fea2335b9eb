"""Tests the list of stored chats."""

from __future__ import annotations

from textual.widgets import Input

from cpuchat.base import paths
from cpuchat.chats.store import ChatStore
from cpuchat.protocol.messages import ModelLoaded
from cpuchat.tui.chat.chat_list import Chats
from cpuchat.tui.widgets.dialogs import AskTextScreen, ConfirmScreen
from tests.support.chat_app import running
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, answer
from tests.support.stored_chats import three_chats


async def test_other_chats_are_read_while_a_model_loads() -> None:
    gate = Gate()
    backend = ScriptedBackend(load_steps=[gate, ModelLoaded(model=MODEL)])
    async with running(backend, prepare=three_chats) as app:
        await app.until(gate.reached.is_set)
        regex, toml, _ = sorted(app.conversation.history.store.chats(), key=lambda chat: chat.title)
        app.chat.open_chat(regex.id)
        await app.until(lambda: [m.content for m in app.transcript.messages] == ["About Regex for dates"])
        await app.send("Queued here", wait=False)
        app.chat.open_chat(toml.id)  # what is queued stays with its chat
        await app.until(lambda: [m.content for m in app.transcript.messages] == ["About TOML schema"])
        assert app.prompt.text == "" and any("not sent" in notice for notice in app.notices)
        await app.press("f4")  # a message can be edited meanwhile, and be sent when the model is there
        await app.press("?", "enter")
        assert not backend.requests
        gate.open()
        await app.until(lambda: backend.requests and not app.chat.busy)
        assert [content for _, content in app.stored()] == ["About TOML schema?", "Hello there."]
        app.chat.open_chat(regex.id)
        await app.until(lambda: app.prompt.text == "Queued here")


async def test_other_chats_wait_while_an_answer_is_written() -> None:
    gate = Gate()
    async with running(ScriptedBackend([answer("One two", gate=gate)]), prepare=three_chats) as app:
        await app.count_up_to(gate)
        app.chat.open_chat(app.conversation.history.store.chats()[-1].id)
        await app.until(lambda: any("when the answer is done" in notice for notice in app.notices))
        assert app.transcript.messages[0].content == "Count"
        gate.open()


async def test_chats_are_listed_searched_opened_and_left() -> None:
    async with running(prepare=three_chats) as app:
        await app.ready()
        options = app.chat.query_one(Chats)
        assert "What is a [roofline]?" in app.screen_text
        options.focus()
        await app.press("slash", *"toml")
        await app.until(lambda: "Regex" not in app.screen_text)
        await app.press("enter", "enter")
        await app.until(lambda: app.conversation.chat is not None)
        assert app.conversation.chat and app.conversation.chat.title == "TOML schema"
        assert app.transcript.messages[0].content == "About TOML schema"
        assert app.app.focused is app.transcript
        await app.press("ctrl+n")
        assert app.conversation.chat is None
        assert not app.transcript.messages


async def test_pinned_chats_are_listed_first_also_after_a_restart() -> None:
    def titles() -> list[str]:
        options = app.chat.query_one(Chats).options
        return [str(option.prompt).strip(" ▌") for option in options]

    async with running(prepare=three_chats) as app:
        await app.ready()
        assert titles() == ["Today", "What is a [roofline]?", "TOML schema", "Regex for dates"]
        app.chat.query_one(Chats).focus()
        await app.press("end", "p")
        await app.until(lambda: titles()[:2] == ["Pinned", "Regex for dates"])
        assert titles()[2:] == ["Today", "What is a [roofline]?", "TOML schema"]
    async with running() as app:
        await app.ready()
        await app.until(lambda: titles()[:2] == ["Pinned", "Regex for dates"])
        app.chat.query_one(Chats).focus()
        await app.press("home", "p")
        await app.until(lambda: titles()[0] == "Today")


async def test_down_goes_from_the_search_to_what_it_found() -> None:
    async with running(prepare=three_chats) as app:
        await app.ready()
        app.chat.query_one("#chat-search", Input).focus()
        await app.press(*"toml")
        chats = app.chat.query_one(Chats)
        await app.until(lambda: [one.id for one in chats.options if one.id and "/" in one.id])
        await app.press("down")
        await app.until(lambda: chats.has_focus)
        await app.press("enter")
        await app.until(lambda: [m.content for m in app.transcript.messages] == ["About TOML schema"])


async def test_renaming_and_deleting_a_chat() -> None:
    async with running(prepare=three_chats) as app:
        await app.ready()
        options = app.chat.query_one(Chats)
        options.focus()
        await app.press("home", "r")
        await app.until(lambda: isinstance(app.app.screen, AskTextScreen))
        await app.press("end", *" now", "enter")
        await app.until(lambda: any(c.title.endswith(" now") for c in app.conversation.history.store.chats()))
        options.focus()
        await app.press("home", "d")
        await app.until(lambda: isinstance(app.app.screen, ConfirmScreen))
        await app.press("enter")  # the safe answer has the focus
        await app.until(lambda: app.app.screen is app.chat)
        assert len(app.conversation.history.store.chats()) == 3
        await app.press("d")
        await app.until(lambda: isinstance(app.app.screen, ConfirmScreen))
        await app.press("y")
        await app.until(lambda: len(app.conversation.history.store.chats()) == 2)


async def test_a_chat_that_another_window_changed_is_loaded_again_and_the_text_stays() -> None:
    async with running() as app:
        await app.ready()
        await app.send("Hello")
        assert app.conversation.chat is not None
        other = ChatStore(paths.chats_db())
        other.add_message(app.conversation.chat.id, "user", "From the other window")
        other.close()
        await app.write("More")
        await app.press("enter")
        await app.until(lambda: len(app.transcript.messages) == 4 and not app.chat.busy)
        assert app.prompt.text == "More"
        shown = [m.content for m in app.transcript.messages]
        assert shown[:3] == ["Hello", "Hello there.", "From the other window"]
        assert "another window" in shown[3]
        await app.press("enter")
        await app.until(lambda: app.stored()[-1] == ("assistant", "Hello there."))
        assert [content for _, content in app.stored()] == [*shown[:3], "More", "Hello there."]
