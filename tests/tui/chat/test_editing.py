"""Tests answers that go on."""

from __future__ import annotations

from tests.support.chat_app import SMALL, running
from tests.support.scripted_backend import Gate, ScriptedBackend, answer


async def test_a_stopped_answer_goes_on_in_the_same_message() -> None:
    gate = Gate()
    script = [answer("One two never", gate=gate, reasoning="Hm"), answer("three."), answer("Five.")]
    async with running(ScriptedBackend(script), size=SMALL) as app:
        await app.ready()
        await app.press("alt+r")
        await app.told("Nothing to continue")
        await app.send("Count", wait=False)
        await app.until(gate.reached.is_set)
        await app.press("escape")
        await app.idle()
        assert app.contents() == ["Count", "One two "] and app.transcript.messages[-1].note.endswith("stopped")
        assert app.stored()[-1] == ("assistant", "One two ")
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
