"""Tests stopping loads and answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.protocol.messages import ModelLoaded, PrefillProgress
from tests.support.chat_app import running
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, answer


async def test_ctrl_c_stops_the_answer_and_quits_only_after_that() -> None:
    gate = Gate()
    backend = ScriptedBackend([answer("One two three never", gate=gate)])
    async with running(backend) as app:
        await app.count_up_to(gate)
        await app.press("ctrl+c")
        await app.until(lambda: not app.chat.busy)
        assert app.transcript.messages[-1].note.endswith("stopped")
        assert not any("quits" in notice for notice in app.notices)
        await app.press("ctrl+c")
        assert any("quits" in notice for notice in app.notices)
        app.press_last("ctrl+c")
        await app.until(lambda: backend.closed)


async def test_escape_takes_a_waiting_message_back_and_then_stops_the_load() -> None:
    gate = Gate()
    backend = ScriptedBackend(load_steps=[gate, ModelLoaded(model=MODEL)])
    async with running(backend) as app:
        await app.until(gate.reached.is_set)
        await app.send("Hello?", wait=False)
        await app.press("escape")
        assert "Queued: " not in app.screen_text
        assert app.prompt.text == "Hello?"
        await app.press("escape")
        await app.until(lambda: not app.chat.busy)
        assert "no model" in app.status
        assert not backend.requests


@pytest.mark.parametrize("stop", ["action_stop", "interrupt"])
async def test_a_load_or_an_answer_that_is_about_to_begin_is_stopped_too(stop: str) -> None:
    backend = ScriptedBackend([[Gate(), *answer("One")]], [Gate(), ModelLoaded(model=MODEL)])
    async with running(backend) as app:
        await app.until(lambda: app.chat.conversation.busy)
        await app.press("escape")
        await app.until(lambda: not app.chat.busy)
        app.chat.load_model(Path(MODEL.path))
        await getattr(app.chat, stop)()
        await app.until(lambda: not app.chat.busy)
        assert "no model" in app.status
        backend.load_steps = [ModelLoaded(model=MODEL)]
        app.chat.load_model(Path(MODEL.path))
        await app.ready()
        app.chat.submit("Count")
        await getattr(app.chat, stop)()
        await app.until(lambda: not app.chat.busy)
        assert app.transcript.messages[-1].content == "Count"  # of an answer without a token nothing is left


async def test_escape_stops_the_answer_and_keeps_what_was_said() -> None:
    gate = Gate()
    async with running(ScriptedBackend([answer("One two three never", gate=gate)])) as app:
        await app.count_up_to(gate)
        await app.press("escape")
        await app.until(lambda: not app.chat.busy)
        assert app.transcript.messages[-1].content == "One two three "
        assert app.transcript.messages[-1].note.endswith("stopped")
        assert app.stored()[-1] == ("assistant", "One two three ")


async def test_stopping_before_the_first_word_brings_the_old_answer_back() -> None:
    gate = Gate()
    waiting = [PrefillProgress(request_id=1, processed=1, total=2, cache_n=0), gate, *answer("The new one.")]
    async with running(ScriptedBackend([answer("The old one."), waiting])) as app:
        await app.ready()
        await app.send("Explain")
        await app.press("ctrl+r")
        await app.until(gate.reached.is_set)
        await app.press("escape")
        await app.until(lambda: not app.chat.busy)
        assert [m.content for m in app.transcript.messages] == ["Explain", "The old one."]

        gate.reached.clear()
        app.chat.commands.edit()
        await app.send("Explain it well", wait=False)
        await app.until(gate.reached.is_set)
        await app.press("escape")
        await app.until(lambda: not app.chat.busy)
        assert [m.content for m in app.transcript.messages] == ["Explain", "The old one."]
        assert app.stored() == [("user", "Explain"), ("assistant", "The old one.")]
        assert app.prompt.text == "Explain it well"
        gate.open()
        await app.press("enter")  # still editing
        await app.until(lambda: app.stored() == [("user", "Explain it well"), ("assistant", "The new one.")])
