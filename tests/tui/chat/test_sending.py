"""Tests sending, queueing, regenerating and editing messages."""

from __future__ import annotations

import pytest

from cpuchat.base import paths
from cpuchat.chats.drafts import DraftSaver
from cpuchat.chats.store import ChatStore
from cpuchat.protocol.messages import ModelLoaded
from cpuchat.tui.chat.composer import QueuedMessages
from tests.support.chat_app import running
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, answer


def stop_reasons() -> list[str | None]:
    """Return those of the newest chat, from the store."""
    store = ChatStore(paths.chats_db())
    try:
        return [message.stop_reason for message in store.messages(store.chats()[0].id)]
    finally:
        store.close()


async def test_a_message_sent_while_loading_waits_and_what_is_typed_after_it_is_the_next_one() -> None:
    gate = Gate()
    backend = ScriptedBackend(load_steps=[gate, ModelLoaded(model=MODEL)])
    async with running(backend) as app:
        await app.until(gate.reached.is_set)
        for key in (*"first", "enter", *"second"):
            app.app.simulate_key(key)
        await app.until(lambda: app.prompt.text == "second" and "Queued: first" in app.screen_text)
        await app.press("enter")
        await app.until(lambda: app.prompt.text == "" and "        second" in app.screen_text)
        await app.press("escape")
        assert app.prompt.text == "first\nsecond"
        await app.press("enter")
        assert not backend.requests
        gate.open()
        await app.until(lambda: backend.requests and not app.chat.busy)
        assert backend.requests[0].messages[-1].content == "first\nsecond"
        assert app.stored()[0] == ("user", "first\nsecond")


async def test_messages_sent_during_an_answer_are_sent_after_it_in_order() -> None:
    gate = Gate()
    backend = ScriptedBackend([answer("One two", gate=gate), answer("Three.")])
    async with running(backend) as app:
        await app.count_up_to(gate)
        for text in ("And then?", "Really?", "Why?"):
            await app.send(text, wait=False)
        assert "Queued: And then?" in app.screen_text and "Esc stops the answer" in app.screen_text
        assert len(backend.requests) == 1
        await app.write("")
        await app.press("up")  # the last one
        assert app.prompt.text == "Why?" and "Why?" not in [one.text for one in app.chat.session.queue]
        await app.press("!", "enter")
        gate.open()
        await app.until(lambda: len(backend.requests) == 4 and not app.chat.busy)
        asked = [request.messages[-1].content for request in backend.requests]
        assert asked == ["Count", "And then?", "Really?", "Why?!"]
        assert [content for role, content in app.stored() if role == "user"] == asked
        assert "Queued: " not in app.screen_text


async def test_an_error_that_ends_the_app_keeps_what_was_written_and_what_was_queued() -> None:
    gate = Gate()
    backend = ScriptedBackend([answer("One two three", gate=gate)])
    with pytest.raises(ZeroDivisionError):
        async with running(backend) as app:
            await app.count_up_to(gate)
            await app.send("And then?", wait=False)
            app.looked = True  # nothing is left to draw
            app.app.fail(ZeroDivisionError())
    assert app.app.saved and DraftSaver(ChatStore(paths.chats_db())).take() == {
        app.app.resume.chat_id: ("And then?", {})
    }
    assert "".join(log.read_text() for log in paths.log_dir().glob("app-*.log")).count("Error") == 1
    assert stop_reasons() == [None, "cancelled"]


async def test_queued_messages_are_edited_in_their_place_and_deleted() -> None:
    gate = Gate()
    backend = ScriptedBackend([answer("One two", gate=gate), answer("Three.")])
    async with running(backend) as app:
        await app.count_up_to(gate)
        for text in ("First", "Second", "Third"):
            await app.send(text, wait=False)
        app.chat.query_one(QueuedMessages).focus()
        await app.press("home", "enter")
        await app.until(lambda: app.prompt.text == "First" and app.prompt.has_focus)
        await app.press("?", "enter")
        app.chat.query_one(QueuedMessages).focus()
        await app.press("end", "delete")
        await app.until(lambda: [one.text for one in app.chat.session.queue] == ["First?", "Second"])
        await app.press("escape")  # stops the answer, not the queue
        await app.until(lambda: len(backend.requests) == 3 and not app.chat.busy)
        assert [one.messages[-1].content for one in backend.requests] == ["Count", "First?", "Second"]
        assert app.stored()[1] == ("assistant", "One ")


async def test_a_message_that_could_not_be_sent_is_only_in_the_prompt() -> None:
    async with running(ScriptedBackend([answer("One.")])) as app:
        await app.ready()
        await app.send("First")
        with app.conversation.activity.streaming():  # by something that the screen does not know of
            await app.press(*"Second", "enter")
            await app.until(lambda: "still being loaded" in app.screen_text and not app.chat.busy)
        assert [message.content for message in app.transcript.messages[:2]] == ["First", "One."]
        assert app.prompt.text == "Second" and "Second" not in [message.content for message in app.transcript.messages]


async def test_editing_my_last_message_replaces_it_and_escape_brings_the_draft_back() -> None:
    backend = ScriptedBackend([answer("First."), answer("Second."), answer("Third.")])
    async with running(backend) as app:
        await app.ready()
        await app.press("ctrl+r")
        assert any("Nothing to regenerate yet" in notice for notice in app.notices)
        await app.send("One")
        await app.send("Two")
        await app.write("half a thought")
        await app.press("f4", "escape")
        assert app.prompt.text == "half a thought"
        assert "Edit last message" not in app.screen_text
        await app.press("f4")
        assert app.prompt.text == "Two"
        assert "Edit last message" in app.screen_text
        await app.press("!", "enter")
        await app.until(lambda: len(backend.requests) == 3 and not app.chat.busy)
        assert [m.content for m in app.transcript.messages] == ["One", "First.", "Two!", "Third."]
        assert [content for _, content in app.stored()] == ["One", "First.", "Two!", "Third."]


async def test_an_answer_that_is_not_saved_is_told_until_it_is() -> None:
    before, end = Gate(), Gate()
    long = "word " * 5000
    steps = answer(long, gate=end)
    async with running(ScriptedBackend([answer("Hm."), [steps[0], before, *steps[1:]]])) as app:
        await app.ready()
        await app.send("Hello")
        await app.send("More", wait=False)
        await app.until(before.reached.is_set)
        app.conversation.history.store._db.execute("PRAGMA max_page_count = 1")  # the disk is full
        before.open()
        await app.until(lambda: "Not saved" in app.screen_text)
        app.conversation.history.store._db.execute("PRAGMA max_page_count = 1000000")
        await app.until(lambda: app.conversation.history.save_problem is None)
        end.open()
        await app.until(lambda: not app.chat.busy)
        assert "Not saved" not in app.screen_text
        assert app.stored()[-1] == ("assistant", long)
