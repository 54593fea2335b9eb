"""Tests an answer that was stopped, or edited, and goes on."""

from __future__ import annotations

import asyncio

from tests.support.chat_app import SMALL, running
from tests.support.scripted_backend import Gate, ScriptedBackend, answer
from tests.tui.chat.test_branches import select, shown


async def test_a_stopped_answer_goes_on_in_the_same_message() -> None:
    gate = Gate()
    script = [answer("One two never", gate=gate, reasoning="Hm"), answer("three."), answer("Five.")]
    async with running(ScriptedBackend(script), size=SMALL) as app:
        await app.ready()
        await app.press("alt+r")
        await app.until(lambda: any("Nothing to continue" in notice for notice in app.notices))
        await app.send("Count", wait=False)
        await app.until(gate.reached.is_set)
        await app.press("escape")
        await app.until(lambda: not app.chat.busy)
        assert shown(app) == ["Count", "One two "]
        before = app.conversation.messages[-1]
        await app.press("alt+r")
        await app.until(lambda: len(app.backend.requests) == 2 and not app.chat.busy)
        request = app.backend.requests[-1]
        assert request.continues and [one.content for one in request.messages] == ["Count", "One two "]
        assert request.messages[-1].reasoning == before.reasoning == "Hm"
        assert shown(app) == ["Count", "One two three."] and not app.transcript.messages[-1].place
        assert app.stored() == [("user", "Count"), ("assistant", "One two three.")]
        after = app.conversation.messages[-1]
        assert (after.id, after.reasoning, after.stop_reason) == (before.id, "Hm", "end")
        assert before.timings is not None and after.timings is not None
        assert after.timings.predicted_n > before.timings.predicted_n
        await app.press("alt+r")  # it is complete
        await app.until(lambda: sum("Nothing to continue" in notice for notice in app.notices) == 2)
        await app.send("Next")
        assert [one.content for one in app.backend.requests[-1].messages] == ["Count", "One two three.", "Next"]


async def test_an_edited_answer_goes_on_and_a_stop_before_the_first_token_leaves_it() -> None:
    gate = Gate()
    later = answer("x")
    script = [answer("One."), [later[0], gate, *later[1:]], answer("dos.")]
    async with running(ScriptedBackend(script)) as app:
        await app.ready()
        await app.send("Count")
        await select(app, 1)
        await app.press("f4")
        await app.write("Uno, ")
        await app.press("enter")
        await app.until(lambda: shown(app) == ["Count", "Uno,"])
        await app.write("/continue")
        await app.press("enter")
        await asyncio.wait_for(gate.reached.wait(), 60)
        assert shown(app) == ["Count", "Uno,"]  # it stays while it is read
        await app.press("escape")
        await app.until(lambda: not app.chat.busy and shown(app) == ["Count", "Uno,"])
        await app.press("alt+r")
        await app.until(lambda: len(app.backend.requests) == 3 and not app.chat.busy)
        assert shown(app) == ["Count", "Uno,dos."]
        assert app.stored()[-1] == ("assistant", "Uno,dos.")
