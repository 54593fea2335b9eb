"""Tests sending, queueing, editing and stopping: messages, answers and loads."""

from __future__ import annotations

import pytest

from cpuchat.base import paths
from cpuchat.chats.drafts import DraftSaver
from cpuchat.chats.store import ChatStore
from cpuchat.protocol.messages import ModelLoaded, PrefillProgress
from tests.support.chat_app import running
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, answer


async def test_a_message_sent_while_loading_waits_and_what_is_typed_after_it_is_the_next_one() -> None:
    gate = Gate()
    backend = ScriptedBackend(load_steps=[gate, ModelLoaded(model=MODEL)])
    async with running(backend) as app:
        await app.until(gate.reached.is_set)
        for key in (*"first", "enter", *"second"):
            app.app.simulate_key(key)
        await app.until(lambda: app.prompt.text == "second" and "Queued: first" in app.screen_text)
        await app.press("enter", "escape")
        assert app.prompt.text == "first\nsecond" and "Queued: " not in app.screen_text
        await app.press("enter")
        assert not backend.requests
        gate.open()
        await app.idle(1)
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
        await app.press("!", "enter", "escape")  # stops the answer, not the queue
        await app.idle(4)
        asked = [request.messages[-1].content for request in backend.requests]
        assert asked == ["Count", "And then?", "Really?", "Why?!"]
        assert [content for role, content in app.stored() if role == "user"] == asked
        assert app.stored()[1] == ("assistant", "One ")
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
    store = ChatStore(paths.chats_db())
    (chat,) = store.chats()
    assert [message.stop_reason for message in store.messages(chat.id)] == [None, "cancelled"]
    assert app.app.saved and DraftSaver(store).take() == {chat.id: ("And then?", {})}
    store.close()
    assert "".join(log.read_text() for log in paths.log_dir().glob("app-*.log")).count("Error") == 1


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
        await app.shows("Not saved")
        app.conversation.history.store._db.execute("PRAGMA max_page_count = 1000000")
        await app.until(lambda: app.conversation.history.saver.problem is None)
        end.open()
        await app.idle()
        assert "Not saved" not in app.screen_text
        assert app.stored()[-1] == ("assistant", long)


async def test_ctrl_c_stops_the_answer_and_quits_only_after_that() -> None:
    gate = Gate()
    backend = ScriptedBackend([answer("One two three never", gate=gate)])
    async with running(backend) as app:
        await app.count_up_to(gate)
        await app.press("ctrl+c")
        await app.idle()
        assert app.transcript.messages[-1].note.endswith("stopped")
        assert not any("quits" in notice for notice in app.notices)
        await app.press("ctrl+c")
        await app.told("quits")
        app.press_last("ctrl+c")
        await app.until(lambda: backend.closed)


async def test_stopping_before_the_first_word_brings_the_old_answer_back() -> None:
    gate = Gate()
    waiting = [PrefillProgress(request_id=1, processed=1, total=2, cache_n=0), gate, *answer("The new one.")]
    async with running(ScriptedBackend([answer("The old one."), waiting])) as app:
        await app.ready()
        await app.send("Explain")
        await app.press("ctrl+r")
        await app.until(gate.reached.is_set)
        await app.press("escape")
        await app.idle()
        assert app.contents() == ["Explain", "The old one."]

        gate.reached.clear()
        app.chat.commands.edit()
        await app.send("Explain it well", wait=False)
        await app.until(gate.reached.is_set)
        await app.press("escape")
        await app.idle()
        assert app.contents() == ["Explain", "The old one."]
        assert app.stored() == [("user", "Explain"), ("assistant", "The old one.")]
        assert app.prompt.text == "Explain it well"
        gate.open()
        await app.press("enter")  # still editing
        await app.until(lambda: app.stored() == [("user", "Explain it well"), ("assistant", "The new one.")])
