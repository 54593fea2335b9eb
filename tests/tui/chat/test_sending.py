"""Tests sending, queueing, editing, stopping and going on: messages, answers and loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.chats.drafts import DraftSaver
from cpuchat.chats.store import ChatStore
from cpuchat.protocol.messages import ModelLoaded, PrefillProgress
from tests.support.chat_app import SMALL, counting, loaded, running
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
    async with counting("One two", answer("Three.")) as (app, _):
        for text in ("And then?", "Really?", "Why?"):
            await app.send(text, wait=False)
        assert "Queued: And then?" in app.screen_text and "Esc stops the answer" in app.screen_text
        assert len(app.backend.requests) == 1
        await app.write("")
        await app.press("up")  # the last one
        assert app.prompt.text == "Why?" and "Why?" not in [one.text for one in app.chat.session.queue]
        await app.press("!", "enter", "escape")  # stops the answer, not the queue
        await app.idle(4)
        asked = [request.messages[-1].content for request in app.backend.requests]
        assert asked == ["Count", "And then?", "Really?", "Why?!"]
        assert [content for role, content in app.stored() if role == "user"] == asked
        assert app.stored()[1] == ("assistant", "One ")
        assert "Queued: " not in app.screen_text


async def test_a_model_file_that_is_dropped_on_the_prompt_is_loaded_and_a_question_about_one_is_sent(
    tiny_model: Path,
) -> None:
    async with counting("One two", answer("Three.")) as (app, _):
        app.prompt.insert(f"'{tiny_model}'")
        await app.press("enter")
        assert app.prompt.text and app.chat.session.source != tiny_model and not app.chat.session.queue  # not yet
        await app.press("escape")
        await app.until(lambda: not app.chat.session.busy)
        await app.press("enter")
        await app.until(lambda: app.chat.session.source == tiny_model and not app.chat.session.busy)
        assert not app.prompt.text
        asked = f"Why is {tiny_model} damaged? {tiny_model.parent / 'no-such.gguf'}"
        await app.send(asked)
        assert app.stored()[-2] == ("user", asked)


async def test_an_error_that_ends_the_app_keeps_what_was_written_and_what_was_queued() -> None:
    with pytest.raises(ZeroDivisionError):
        async with counting("One two three") as (app, _):
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
    async with loaded(ScriptedBackend([answer("Hm."), [steps[0], before, *steps[1:]]])) as app:
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


async def test_ctrl_c_stops_the_answer_then_copies_a_selection_then_hints_then_quits() -> None:
    async with counting("One two three never") as (app, _):
        await app.press("ctrl+c")
        await app.idle()
        assert app.transcript.messages[-1].note.endswith("stopped")
        await app.write("copy me")
        app.prompt.select_all()
        await app.press("ctrl+c")
        assert app.app.clipboard == "copy me"
        app.prompt.clear()
        assert not any("quits" in notice for notice in app.notices)
        await app.press("ctrl+c")
        await app.told("quits")
        assert not app.backend.closed
        app.press_last("ctrl+c")
        await app.until(lambda: app.backend.closed)


async def test_stopping_before_the_first_word_brings_the_old_answer_back() -> None:
    gate = Gate()
    waiting = [PrefillProgress(request_id=1, processed=1, total=2, cache_n=0), gate, *answer("The new one.")]
    async with loaded(ScriptedBackend([answer("The old one."), waiting])) as app:
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


async def test_a_stopped_answer_goes_on_in_the_same_message() -> None:
    gate = Gate()
    script = [answer("One two never", gate=gate, reasoning="Hm"), answer("three."), answer("Five.")]
    async with loaded(ScriptedBackend(script), size=SMALL) as app:
        await app.press("alt+r")
        await app.told("Nothing to continue")
        await app.send("Count", wait=False)
        await app.until(gate.reached.is_set)
        await app.press("escape")
        await app.idle()
        assert app.contents() == ["Count", "One two "] and app.transcript.messages[-1].note.endswith("stopped")
        assert app.stored()[-1] == ("assistant", "One two ") and "Alt+R continues" in app.screen_text
        before = app.conversation.messages[-1]
        await app.press("alt+r")
        await app.idle(2)
        request = app.backend.requests[-1]
        assert request.continues and [one.content for one in request.messages] == ["Count", "One two "]
        assert request.messages[-1].reasoning == before.reasoning == "Hm"
        assert app.contents() == ["Count", "One two three."] and not app.transcript.messages[-1].place
        assert app.stored() == [("user", "Count"), ("assistant", "One two three.")]
        after = app.conversation.messages[-1]
        assert (after.id, after.reasoning, after.stop_reason) == (before.id, "Hm", "end")
        assert before.timings is not None and after.timings is not None
        assert after.timings.predicted_n > before.timings.predicted_n
        await app.press("alt+r")  # it is complete
        await app.until(lambda: sum("Nothing to continue" in notice for notice in app.notices) == 2)
        await app.send("Next")
        assert [one.content for one in app.backend.requests[-1].messages] == ["Count", "One two three.", "Next"]


async def test_a_request_stopped_before_its_first_token_is_answered_by_continuing() -> None:
    gate = Gate()
    async with loaded(ScriptedBackend([[gate, *answer("Never")], answer("Now.")])) as app:
        await app.send("Count", wait=False)
        await app.until(gate.reached.is_set)
        await app.press("escape")
        await app.idle()
        assert app.contents() == ["Count"]
        await app.press("alt+r")
        await app.idle(2)
        assert app.contents() == ["Count", "Now."] and not app.backend.requests[-1].continues
