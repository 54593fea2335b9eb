"""Tests branches on the chat screen: switching, forking, deleting, and what a search found in them."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.widgets import Input

from cpuchat.base import paths
from cpuchat.base.errors import ChatsError
from cpuchat.chats.records import StoredMessage
from cpuchat.chats.store import ChatStore, Deleted, Matcher
from cpuchat.config import settings
from cpuchat.protocol.messages import Role
from cpuchat.session.conversation import Conversation
from cpuchat.tui.chat import transcript
from cpuchat.tui.chat.chat_list import Chats, excerpt_row
from cpuchat.tui.chat.transcript import stored_message
from cpuchat.tui.markdown.message_view import TranscriptMessage
from cpuchat.tui.widgets.dialogs import AskTextScreen, ConfirmScreen
from tests.support.chat_app import SMALL, WIDE, RunningApp, running
from tests.support.scripted_backend import Gate, ScriptedBackend, answer


def shown(app: RunningApp) -> list[str]:
    return [message.content for message in app.transcript.messages]


async def again(app: RunningApp) -> None:
    requests = len(app.backend.requests)
    await app.press("ctrl+r")
    await app.until(lambda: len(app.backend.requests) > requests and not app.chat.busy)


async def select(app: RunningApp, index: int) -> None:
    """Put the marker on the message with this index."""
    app.transcript.focus()
    await app.until(lambda: app.transcript.has_focus)
    last = len(app.transcript.messages) - 1
    await app.press("j", *("j" * last), *("k" * (last - index)))


async def test_the_answers_to_a_question_are_browsed_by_key_and_mouse_and_past_the_last_that_is_said() -> None:
    async with running(ScriptedBackend([answer("One."), answer("Two."), answer("Three.")]), size=SMALL) as app:
        await app.ready()
        await app.send("Say something")
        assert "‹" not in app.screen_text
        await again(app)
        assert "‹ 2/2 ›" in app.screen_text
        await again(app)
        assert "‹ 3/3 ›" in app.screen_text and shown(app) == ["Say something", "Three."]
        await app.press("alt+left")  # the prompt has the focus
        await app.until(lambda: "‹ 2/3 ›" in app.screen_text)
        assert shown(app) == ["Say something", "Two."]
        await app.press("alt+right", "alt+right")
        await app.until(lambda: any("This is the last of 3." in notice for notice in app.notices))
        await app.until(lambda: "‹ 3/3 ›" in app.screen_text)

        line = next(y for y, row in enumerate(app.screen_text.splitlines()) if "‹ 3/3 ›" in row)
        at = app.screen_text.splitlines()[line].index("‹")
        await app.pilot.click(offset=(at, line))
        await app.until(lambda: "‹ 2/3 ›" in app.screen_text)
        assert shown(app) == ["Say something", "Two."]
        await select(app, 1)
        await app.press("h")
        await app.until(lambda: "‹ 1/3 ›" in app.screen_text)
        await app.press("alt+left")
        await app.until(lambda: any("This is the first of 3." in notice for notice in app.notices))
        await app.press("right")  # the marker is still on the answer
        await app.until(lambda: "‹ 2/3 ›" in app.screen_text)
        assert app.backend.requests[-1].messages[-1].content == "Say something"
        assert [content for _, content in app.stored()] == ["Say something", "Two."]


async def test_the_footer_of_the_transcript_has_room_for_all_its_keys_and_without_branches_that_is_said() -> None:
    async with running(size=WIDE) as app:
        await app.ready()
        await app.send("Hello")
        await app.press("alt+left")
        assert any("No other answer" in notice for notice in app.notices)
        app.transcript.focus()
        await app.until(lambda: " k previous  j next  f fork " in app.screen_text)
        assert app.screen_text.splitlines()[-1].rstrip().endswith("^P commands")


async def test_the_selected_message_is_edited_and_answered_again() -> None:
    backend = ScriptedBackend([answer(text) for text in ("One.", "Two.", "Three.", "Four.")])
    async with running(backend) as app:
        await app.ready()
        await app.send("First")
        await app.send("Second")
        await select(app, 1)
        await again(app)
        assert shown(app) == ["First", "Three."]
        await select(app, 0)
        await app.press("f4")
        assert app.prompt.text == "First"
        await app.press("!", "enter")
        await app.until(lambda: len(backend.requests) == 4 and not app.chat.busy)
        assert shown(app) == ["First!", "Four."]
        await app.press("alt+left")
        await app.until(lambda: shown(app) == ["First", "Three."])
        await select(app, 1)
        await app.press("h")
        await app.until(lambda: shown(app) == ["First", "One.", "Second", "Two."])


async def test_an_edit_of_an_earlier_message_that_is_stopped_changes_nothing() -> None:
    gate = Gate()
    backend = ScriptedBackend([answer("One."), answer("Two."), [answer("x")[0], gate, *answer("x")[1:]]])
    async with running(backend) as app:
        await app.ready()
        await app.send("First")
        await app.send("Second")
        await select(app, 0)
        await app.press("f4", "!", "enter")
        await app.until(gate.reached.is_set)
        await app.press("escape")
        await app.until(lambda: not app.chat.busy)
        await app.until(lambda: shown(app) == ["First", "One.", "Second", "Two."])
        assert [content for _, content in app.stored()] == shown(app)


async def test_a_fork_is_opened_and_the_chat_stays() -> None:
    async with running(ScriptedBackend([answer("One."), answer("Two.")])) as app:
        await app.ready()
        await app.send("First")
        await app.send("Second")
        await select(app, 1)
        await app.press("f")
        await app.until(lambda: shown(app) == ["First", "One."])
        assert app.conversation.chat and app.conversation.chat.title == "Fork: First"
        assert "Fork: First" in str(app.transcript.border_title)
        assert sorted(chat.title for chat in app.conversation.history.store.chats()) == ["First", "Fork: First"]


async def test_a_deleted_branch_and_a_deleted_chat_come_back() -> None:
    async with running(ScriptedBackend([answer("One."), answer("Two.")])) as app:
        await app.ready()
        await app.send("First")
        await again(app)
        await select(app, 1)
        await app.press("d")
        await app.until(lambda: isinstance(app.app.screen, ConfirmScreen))
        await app.press("y")
        await app.until(lambda: shown(app) == ["First", "One."])
        assert "‹" not in app.screen_text
        app.chat.query_one(Chats).focus()
        await app.press("home", "d")
        await app.until(lambda: isinstance(app.app.screen, ConfirmScreen))
        await app.press("y")
        await app.until(lambda: app.conversation.chat is None and not shown(app))
        app.chat.query_one(Chats).focus()
        await app.press("u")
        await app.until(lambda: shown(app) == ["First", "One."])
        app.chat.commands.undo_delete()
        await app.until(lambda: shown(app) == ["First", "Two."])
        app.chat.commands.undo_delete()
        await app.until(lambda: any("Nothing to undo" in notice for notice in app.notices))


async def test_the_key_that_a_deletion_names_undoes_it() -> None:
    async with running(ScriptedBackend([answer("One.")])) as app:
        await app.ready()
        await app.send("First")
        for index, left in ((1, ["First"]), (0, [])):
            await select(app, index)
            await app.press("d")
            await app.until(lambda: isinstance(app.app.screen, ConfirmScreen))
            await app.press("y")
            await app.until(lambda left=left: shown(app) == left and app.app.screen is app.chat)
            if not left:
                assert app.notices[-1] == "Deleted. U in the chat list undoes it."
                app.chat.query_one(Chats).focus()
            await app.press("u")
            await app.until(lambda: shown(app) == ["First", "One."])
            assert not app.prompt.text


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


async def test_what_was_found_is_shown_on_its_branch_and_marked() -> None:
    async with running(prepare=long_chat) as app:
        await app.ready()
        app.chat.query_one(Chats).focus()
        await app.press("slash", *"needle")
        await app.until(lambda: "the Needle" in app.screen_text)
        await app.press("enter", "down", "enter")
        await app.until(lambda: app.transcript.messages and app.transcript.up_to_date)
        assert "the Needle" in app.screen_text and "‹" not in app.screen_text
        assert not app.transcript.following
        marked = [
            segment.text for y in range(app.transcript.size.height) for segment in app.transcript.render_line(y)
            if segment.style and segment.style.reverse and segment.text.strip()
        ]  # fmt: skip
        assert marked == ["Needle"]
        await app.press("n")
        assert "a needle" in app.screen_text and "the Needle" not in app.screen_text
        await app.press("n")
        assert "a needle" in app.screen_text  # the last one: names and reasoning do not count
        await app.press("N")
        assert "the Needle" in app.screen_text


async def test_a_comparison_that_is_put_back_is_opened_as_one() -> None:
    sides = (
        '{"sides":[{"path":"/m/q8.gguf","changes":{},"model":"Qwen","quantization":"Q8_0"},'
        '{"path":"/m/q4.gguf","changes":{},"model":"Qwen","quantization":"Q4_K_M"}]}'
    )

    def deleted_comparison(conversation: Conversation) -> None:
        store = conversation.history.store
        chat = store.create_chat("m", title="Q8 against Q4", sides=sides)
        store.add_message(chat.id, "user", "Why?")
        store.add_message(chat.id, "assistant", "A needle.", stop_reason="end")
        store.add_message(chat.id, "assistant", "Another.", stop_reason="end")

    async with running(prepare=deleted_comparison) as app:
        await app.ready()
        (chat,) = app.conversation.history.store.chats()
        await app.conversation.delete_chat(chat.id)
        opened: list[str] = []
        app.chat.commands.open_comparison = lambda chat, _: opened.append(chat.id)  # type: ignore[method-assign]
        app.chat.commands.undo_delete()
        await app.until(lambda: opened == [chat.id])
        assert app.conversation.chat is None and not shown(app)


async def test_a_message_that_is_saved_late_can_be_deleted_then(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(ScriptedBackend([answer("One."), answer("Two.")])) as app:
        await app.ready()
        await app.send("First")
        added, full = ChatStore.add_message, True

        def add(store: ChatStore, chat_id: str, role: Role, *args: Any, **named: Any) -> StoredMessage:
            if role == "assistant" and full:
                raise ChatsError("Cannot save your chats: the disk is full.")
            return added(store, chat_id, role, *args, **named)

        monkeypatch.setattr(ChatStore, "add_message", add)
        await app.send("Second")
        await select(app, 3)
        await app.press("d")
        await app.until(lambda: any("Select a message" in notice for notice in app.notices))
        full = False
        await app.until(lambda: "Answer saved." in app.notices)
        await app.press("d")
        await app.until(lambda: isinstance(app.app.screen, ConfirmScreen))
        await app.press("y")
        await app.until(lambda: shown(app) == ["First", "One.", "Second"])


async def test_undoing_twice_while_an_answer_is_saved_late_undoes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(ScriptedBackend([answer("One."), answer("Two.")])) as app:
        await app.ready()
        await app.send("First")
        await app.conversation.delete_message(app.conversation.messages[-1].id)
        with monkeypatch.context() as full:
            full.setattr(ChatStore, "update_message", refuse_to_save)
            full.setattr(ChatStore, "add_message", refuse_to_save)
            app.chat.commands.regenerate()
            await app.until(lambda: app.conversation.history.save_problem and not app.chat.busy)
        app.chat.commands.undo_delete()
        app.chat.commands.undo_delete()
        await app.until(lambda: "Nothing to undo." in app.notices)
        await app.until(lambda: shown(app) == ["First", "One."])


def refuse_to_save(*_: object, **__: object) -> None:
    raise ChatsError("Cannot save your chats: the disk is full.")


async def test_a_key_that_deletes_waits_for_what_is_being_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    deleting, may_delete, handled = threading.Event(), threading.Event(), asyncio.Event()
    delete = ChatStore.delete_branch

    def slowly(*arguments: Any) -> Deleted:
        deleting.set()
        may_delete.wait(180)
        return delete(*arguments)

    monkeypatch.setattr(ChatStore, "delete_branch", slowly)
    async with running(ScriptedBackend([answer("One.")])) as app:
        await app.ready()
        await app.send("First")
        await select(app, 0)
        await app.press("d")
        await app.until(lambda: isinstance(app.app.screen, ConfirmScreen))
        await app.press("y")
        await app.until(deleting.is_set)
        app.app.simulate_key("d")
        app.app.post_message(events.Callback(handled.set))
        may_delete.set()
        await app.until(lambda: app.conversation.chat is None and handled.is_set())
        assert app.app.screen is app.chat


async def test_what_is_copied_after_a_question_is_its_answer() -> None:
    async with running(ScriptedBackend([answer("One."), answer("Two."), answer("Three.")])) as app:
        await app.ready()
        await app.send("First")
        await again(app)
        await app.press("alt+left")
        await app.until(lambda: shown(app) == ["First", "One."])
        await app.send("Second")
        await app.press("f5")
        assert app.app.clipboard.strip() == "Three."


async def test_another_branch_ends_an_edit() -> None:
    async with running(ScriptedBackend([answer(text) for text in ("One.", "Two.", "Three.")])) as app:
        await app.ready()
        await app.send("First")
        await app.press("f4", "!", "enter")
        await app.until(lambda: shown(app) == ["First!", "Two."] and not app.chat.busy)
        await app.press("f4")
        assert app.prompt.text == "First!"
        await app.press("alt+left")
        await app.until(lambda: shown(app) == ["First", "One."])
        assert app.prompt.text == "" and not app.prompt.has_class("-editing")
        await app.press("up")
        assert app.prompt.text == "First"  # as it was asked on this branch
        await app.press("down")
        await app.send("Second")
        assert shown(app) == ["First", "One.", "Second", "Three."]


async def test_a_long_chat_is_not_converted_before_its_end_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def convert(message: StoredMessage, *rest: Any) -> TranscriptMessage:
        made.append(message.id)
        return stored_message(message, *rest)

    monkeypatch.setattr(transcript, "stored_message", convert)
    async with running(prepare=long_chat) as app:
        await app.ready()
        (chat,) = app.conversation.history.store.chats()
        app.chat.open_chat(chat.id, 2)
        await app.until(lambda: len(app.conversation.messages) > 20 and app.transcript.up_to_date)
        made.clear()
        app.chat.show_chat()
        assert 0 < len(made) < len(app.conversation.messages)
        assert made[0] == app.conversation.messages[-1].id


async def test_a_dialog_over_a_long_chat_that_is_rendered_again_is_freed() -> None:
    async with running(prepare=long_chat) as app:
        await app.ready()
        (chat,) = app.conversation.history.store.chats()
        app.chat.open_chat(chat.id, 2)
        await app.until(lambda: len(shown(app)) > 20 and app.transcript.up_to_date)
        await app.app.push_screen(ConfirmScreen("Title", "Question?", "Yes", "No"))
        dialog = weakref.ref(app.app.screen)
        app.transcript.toggle_reasoning()
        assert not app.transcript.up_to_date
        await app.until(lambda: app.transcript.up_to_date)
        await app.press("escape")
        await app.until(lambda: app.app.screen is app.chat)
        await app.press("tab", "tab")  # what the last key concerned is let go
        await app.pilot.pause()
        gc.collect()
        assert dialog() is None


async def test_the_open_chat_is_exported(tmp_path: Path) -> None:
    async with running(ScriptedBackend([answer("One.")])) as app:
        await app.ready()
        await app.send("First")
        for name, start in (("chat.md", "# First\n"), ("chat.json", "{\n")):
            file = tmp_path / name
            app.chat.commands.export_chat()
            await app.until(lambda: isinstance(app.app.screen, AskTextScreen))
            await app.until(lambda: f"Folder: {paths.shown(Path.cwd())[:30]}" in app.screen_text)
            app.app.screen.query_one(Input).value = str(file)
            await app.press("enter")
            await app.until(file.exists)
            assert file.read_text().startswith(start) and "One." in file.read_text()


async def test_after_the_current_folder_was_deleted_the_home_folder_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    async with running(ScriptedBackend([answer("One.")])) as app:
        await app.ready()
        await app.send("First")
        (gone := tmp_path / "gone").mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        app.chat.commands.tools()
        await app.until(lambda: isinstance(app.app.screen, AskTextScreen))
        assert app.app.screen.query_one(Input).value == "~"
        await app.press("escape")
        app.chat.commands.export_chat()
        await app.until(lambda: isinstance(app.app.screen, AskTextScreen))
        await app.press("enter")
        await app.until((tmp_path / "First.md").exists)


@pytest.mark.parametrize("content", ["the long needle", "x\x1b[1m the\u202e long\n needle", "needle"])
def test_the_row_of_a_hit_marks_what_was_found(content: str) -> None:
    row = excerpt_row(Matcher("needle").excerpt(1, content * 3))
    assert {row.plain[span.start : span.end] for span in row.spans} == {"needle"}


async def test_regenerating_a_greedy_answer_says_that_it_will_be_the_same() -> None:
    settings.update({"sampling": {"temperature": 0.0}})
    async with running() as app:
        await app.ready()
        await app.send("Say something")
        await again(app)
        assert any(notice.startswith("Greedy sampling: expect the same answer again. F2") for notice in app.notices)


async def test_the_panel_shows_the_figures_of_the_answer_that_is_switched_to() -> None:
    async with running(ScriptedBackend([answer("One."), answer("Two and more words.")])) as app:
        await app.ready()
        await app.send("First")
        await again(app)
        written = app.conversation.figures().predicted_n
        await app.press("alt+left")
        await app.until(lambda: "‹ 1/2 ›" in app.screen_text)
        figures = app.conversation.figures()
        assert figures.phase == "done" and 0 < figures.predicted_n < written


async def test_a_stop_before_the_first_token_leaves_no_empty_answer() -> None:
    gate = Gate()
    async with running(ScriptedBackend([[gate, *answer("Never.")]])) as app:
        await app.count_up_to(gate)
        await app.press("escape")
        await app.until(lambda: any("stopped before the first token" in notice for notice in app.notices))
        assert [message.role for message in app.transcript.messages] == ["user"]
