"""Tests branches on the chat screen: switching, forking, deleting, and what a search found in them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from cpuchat.base.errors import ChatsError
from cpuchat.chats.records import StoredMessage
from cpuchat.chats.store import ChatStore, Matcher
from cpuchat.protocol.messages import Role
from cpuchat.session.conversation import Conversation
from cpuchat.tui.chat.chat_list import Chats, excerpt_row
from cpuchat.tui.widgets.dialogs import AskTextScreen, ConfirmScreen
from tests.support.chat_app import RunningApp, loaded
from tests.support.scripted_backend import Gate, ScriptedBackend, answer


async def again(app: RunningApp) -> None:
    requests = len(app.backend.requests)
    await app.press("ctrl+r")
    await app.idle(requests + 1)


async def test_the_answers_to_a_question_are_browsed_and_past_the_last_that_is_said() -> None:
    answers = [answer(text) for text in ("One.", "Two.", "Three words.", "Four.")]
    async with loaded(ScriptedBackend(answers)) as app:
        await app.send("Say something")
        await app.press("alt+left")
        await app.told("No other answer")
        assert "‹" not in app.screen_text
        await again(app)
        assert "‹ 2/2 ›" in app.screen_text
        await again(app)
        assert "‹ 3/3 ›" in app.screen_text and app.contents() == ["Say something", "Three words."]
        written = app.conversation.figures().predicted_n
        await app.press("alt+left")  # the prompt has the focus
        await app.shows("‹ 2/3 ›")
        assert app.contents() == ["Say something", "Two."]
        figures = app.conversation.figures()  # of the answer that is shown
        assert figures.phase == "done" and 0 < figures.predicted_n < written
        await app.press("alt+right", "alt+right")
        await app.told("This is the last of 3.")
        await app.shows("‹ 3/3 ›")

        await app.press("alt+left")
        await app.shows("‹ 2/3 ›")
        await app.select(1)
        await app.shows(" k previous  j next  f fork ")
        assert app.screen_text.splitlines()[-1].rstrip().endswith("^P commands")
        await app.press("h")
        await app.shows("‹ 1/3 ›")
        await app.press("alt+left")
        await app.told("This is the first of 3.")
        await app.press("right")  # the marker is still on the answer
        await app.shows("‹ 2/3 ›")
        assert [content for _, content in app.stored()] == ["Say something", "Two."]
        await app.send("Second")
        await app.press("f5")
        assert app.app.clipboard.strip() == "Four."


async def test_an_earlier_message_is_edited_and_answered_again_and_another_branch_ends_an_edit() -> None:
    gate = Gate()
    stopped = [answer("x")[0], gate, *answer("x")[1:]]
    texts = [answer(text) for text in ("One.", "Two.", "Three.", "Four.")]
    async with loaded(ScriptedBackend([*texts, stopped, answer("Five.")])) as app:
        await app.send("First")
        await app.send("Second")
        await app.select(1)
        await again(app)
        assert app.contents() == ["First", "Three."]
        await app.select(0)
        await app.press("f4")
        assert app.prompt.text == "First"
        await app.press("!", "enter")
        await app.idle(4)
        assert app.contents() == ["First!", "Four."]

        await app.press("f4", "!", "enter")  # an edit that is stopped changes nothing
        await app.until(gate.reached.is_set)
        await app.press("escape")
        await app.idle()
        await app.until(lambda: app.contents() == ["First!", "Four."])
        assert [content for _, content in app.stored()] == app.contents()

        await app.press("escape", "f4")
        assert app.prompt.text == "First!"
        await app.press("alt+left")
        await app.until(lambda: app.contents() == ["First", "Three."])
        assert app.prompt.text == "" and not app.prompt.has_class("-editing")
        await app.press("up")
        assert app.prompt.text == "First"  # as it was asked on this branch
        await app.press("down")
        await app.select(1)
        await app.press("h")
        await app.until(lambda: app.contents() == ["First", "One.", "Second", "Two."])


async def test_a_fork_is_opened_and_what_was_deleted_comes_back() -> None:
    async with loaded(ScriptedBackend([answer("One."), answer("Two."), answer("Three.")])) as app:
        await app.send("First")
        await app.send("Second")
        await app.select(1)
        await app.press("f")
        await app.until(lambda: app.contents() == ["First", "One."])
        assert "Fork: First" in str(app.transcript.border_title)

        for index, left in ((1, ["First"]), (0, [])):  # the key that a deletion names undoes it
            await app.select(index)
            await app.press("d")
            await app.confirm()
            await app.until(lambda left=left: app.contents() == left and app.app.screen is app.chat)
            if not left:
                assert app.notices[-1] == "Deleted. U in the chat list undoes it."
                app.chat.query_one(Chats).focus()
            await app.press("u")
            await app.until(lambda: app.contents() == ["First", "One."])
            assert not app.prompt.text

        await again(app)
        await app.select(1)
        await app.press("d")
        await app.confirm()
        await app.until(lambda: app.contents() == ["First", "One."])
        assert "‹" not in app.screen_text
        app.chat.query_one(Chats).focus()
        await app.press("home", "d")
        await app.confirm()
        await app.until(lambda: app.conversation.chat is None and not app.contents())
        app.chat.query_one(Chats).focus()
        await app.press("u")
        await app.until(lambda: app.contents() == ["First", "One."])


async def test_the_open_chat_is_exported_by_the_name_of_the_file(tmp_path: Path) -> None:
    async with loaded(ScriptedBackend([answer("One.")])) as app:
        await app.send("First")
        for name, start in (("chat.md", "# First\n"), ("chat.json", "{\n"), ("chat.md/chat.md", "")):
            app.chat.commands.export_chat()
            await app.opens(AskTextScreen)
            field = app.app.screen.query_one(Input)
            assert field.value == "First.md"
            field.value = str(file := tmp_path / name)
            await app.press("enter")
            if start:
                await app.until(file.exists)
                assert file.read_text().startswith(start) and "One." in file.read_text()
        await app.told("Exported to", "no folder")


def long_chat(conversation: Conversation) -> None:
    store = conversation.history.store
    chat = store.create_chat("m", title="Long")
    question = store.add_message(chat.id, "user", "Which?")
    text = "\n\n".join(f"line {n}" for n in range(100))
    store.add_message(
        chat.id, "assistant", f"{text}\n\nthe Needle\n\n{text}\n\na needle\n\n{text}", stop_reason="end",
        model="Needle 7B", reasoning="What needle?",
    )  # fmt: skip
    for _ in range(20):
        store.add_message(chat.id, "user", text)
    store.add_message(chat.id, "assistant", "Another branch.", after=question.id, stop_reason="end")


async def test_what_was_found_is_shown_on_its_branch() -> None:
    async with loaded(prepare=long_chat, size=(160, 40)) as app:
        app.chat.query_one(Chats).focus()
        await app.press("slash", *"needle")
        await app.shows("the Needle")
        await app.press("enter", "down", "enter")
        await app.until(lambda: app.transcript.messages and app.transcript.up_to_date)
        assert "Needle 7B  ‹ 1/2 ›" in app.screen_text
        assert not app.transcript.following


async def test_a_dialog_over_a_long_chat_is_freed() -> None:
    async with loaded(prepare=long_chat) as app:
        (chat,) = app.conversation.history.store.chats()
        app.chat.commands.open(chat.id, 2)
        await app.until(lambda: len(app.conversation.messages) > 20 and app.transcript.up_to_date)
        await app.app.push_screen(ConfirmScreen("Title", "Question?", "Yes", "No"))
        dialog = weakref.ref(app.app.screen)
        app.transcript.toggle_reasoning()  # renders the chat again
        assert not app.transcript.up_to_date
        await app.until(lambda: app.transcript.up_to_date)
        await app.press("escape")
        await app.closes()
        await app.press("tab", "tab")  # what the last key concerned is let go
        await app.pilot.pause()
        gc.collect()
        assert dialog() is None


async def test_a_message_that_is_saved_late_can_be_deleted_then_and_undoing_twice_undoes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added, full = ChatStore.add_message, True

    def add(store: ChatStore, chat_id: str, role: Role, *args: Any, **named: Any) -> StoredMessage:
        if role == "assistant" and full:
            raise ChatsError("Cannot save your chats: the disk is full.")
        return added(store, chat_id, role, *args, **named)

    async with loaded(ScriptedBackend([answer("One."), answer("Two.")])) as app:
        await app.send("First")
        monkeypatch.setattr(ChatStore, "add_message", add)
        await app.send("Second")
        await app.select(3)
        await app.press("d")
        await app.told("Select a message")
        full = False
        await app.told("Answer saved.")
        await app.press("d")
        await app.confirm()
        await app.until(lambda: app.contents() == ["First", "One.", "Second"])
        app.chat.commands.undo_delete()
        app.chat.commands.undo_delete()
        await app.told("Nothing to undo.")
        await app.until(lambda: app.contents() == ["First", "One.", "Second", "Two."])


@pytest.mark.parametrize("content", ["the long needle", "x\x1b[1m the\u202e long\n needle", "needle"])
def test_the_row_of_a_hit_marks_what_was_found(content: str) -> None:
    row = excerpt_row(Matcher("needle").excerpt(1, content * 3))
    assert {row.plain[span.start : span.end] for span in row.spans} == {"needle"}
