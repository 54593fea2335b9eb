"""Tests sending, queueing, regenerating and editing messages."""

from __future__ import annotations

from cpuchat.protocol import (
    ModelLoaded,
)
from tests.support.chat_app import running
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, answer


async def test_a_message_sent_while_loading_waits_for_the_model() -> None:
    gate = Gate()
    backend = ScriptedBackend(load_steps=[gate, ModelLoaded(model=MODEL)])
    async with running(backend) as app:
        await app.until(gate.reached.is_set)
        await app.send("Hello?", wait=False)
        assert "Queued: " in app.screen_text
        assert not backend.requests
        gate.open()
        await app.until(lambda: backend.requests and not app.chat.busy)
        assert backend.requests[0].messages[-1].content == "Hello?"
        assert app.stored()[0] == ("user", "Hello?")


async def test_what_is_typed_after_a_queued_message_is_the_next_one() -> None:
    gate = Gate()
    backend = ScriptedBackend(load_steps=[gate, ModelLoaded(model=MODEL)])
    async with running(backend) as app:
        await app.until(gate.reached.is_set)
        for key in (*"first", "enter", *"second"):
            app.app.simulate_key(key)
        await app.until(lambda: app.prompt.text == "second")
        assert "Queued: first" in app.screen_text
        await app.press("enter")  # one is queued already
        assert app.prompt.text == "second"
        await app.press("escape")
        assert app.prompt.text == "first\nsecond"
        await app.press("enter")
        gate.open()
        await app.until(lambda: backend.requests and not app.chat.busy)
        assert backend.requests[0].messages[-1].content == "first\nsecond"


async def test_sending_during_an_answer_keeps_the_text_in_the_prompt() -> None:
    gate = Gate()
    backend = ScriptedBackend([answer("One two", gate=gate)])
    async with running(backend) as app:
        await app.count_up_to(gate)
        await app.send("And then?", wait=False)
        assert any("Esc stops it" in notice for notice in app.notices)
        assert app.prompt.text == "And then?"
        assert len(backend.requests) == 1
        gate.open()
        await app.until(lambda: not app.chat.busy)
        assert len(backend.requests) == 1


async def test_a_message_that_could_not_be_sent_is_only_in_the_prompt() -> None:
    async with running(ScriptedBackend([answer("One.")])) as app:
        await app.ready()
        await app.send("First")
        app.conversation._running = True  # by something that the screen does not know of
        await app.press(*"Second", "enter")
        await app.until(lambda: "still being loaded" in app.screen_text and not app.chat.busy)
        app.conversation._running = False
        assert [message.content for message in app.transcript.messages[:2]] == ["First", "One."]
        assert app.prompt.text == "Second" and "Second" not in [message.content for message in app.transcript.messages]


async def test_again_replaces_the_last_answer() -> None:
    backend = ScriptedBackend([answer("First."), answer("Second.")])
    async with running(backend) as app:
        await app.ready()
        await app.send("Say something")
        await app.press("ctrl+r")
        await app.until(lambda: len(backend.requests) == 2 and not app.chat.busy)
        assert [m.content for m in app.transcript.messages] == ["Say something", "Second."]
        assert app.stored() == [("user", "Say something"), ("assistant", "Second.")]


async def test_again_without_a_message_says_so() -> None:
    async with running() as app:
        await app.ready()
        await app.press("ctrl+r")
        assert any("Nothing to regenerate yet" in notice for notice in app.notices)


async def test_editing_my_last_message_replaces_it_and_what_followed() -> None:
    backend = ScriptedBackend([answer("First."), answer("Second."), answer("Third.")])
    async with running(backend) as app:
        await app.ready()
        await app.send("One")
        await app.send("Two")
        await app.write("half a thought")
        await app.press("f4")
        assert app.prompt.text == "Two"
        assert "Edit last message" in app.screen_text
        await app.press("!", "enter")
        await app.until(lambda: len(backend.requests) == 3 and not app.chat.busy)
        assert [m.content for m in app.transcript.messages] == ["One", "First.", "Two!", "Third."]
        assert [content for _, content in app.stored()] == ["One", "First.", "Two!", "Third."]


async def test_escape_leaves_editing_and_brings_the_draft_back() -> None:
    async with running() as app:
        await app.ready()
        await app.send("One")
        await app.write("half a thought")
        await app.press("f4", "escape")
        assert app.prompt.text == "half a thought"
        assert "Editing" not in app.screen_text


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
