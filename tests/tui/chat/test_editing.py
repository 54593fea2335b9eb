"""Tests answers that go on, and edits of a chat's system prompt."""

from __future__ import annotations

from cpuchat.telemetry.roofline import Reach
from cpuchat.tui.chat.transcript import ChatTranscript
from tests.support.chat_app import SMALL, running
from tests.support.scripted_backend import Gate, ScriptedBackend, answer


async def test_a_chats_system_prompt_is_edited_and_what_that_costs_is_said() -> None:
    backend = ScriptedBackend([answer("One.", prompt_n=500), answer("Two."), answer("Three.")])
    async with running(backend, size=SMALL) as app:
        await app.ready()
        await app.write("a draft")
        await app.press("alt+s")
        await app.until(lambda: app.prompt.border_title == "Edit system prompt" and not app.prompt.text)
        await app.press(*"Be brief.", "enter")
        await app.until(lambda: app.prompt.border_title == "Message · own system prompt")
        assert app.prompt.text == "a draft" and "System prompt set for this chat." in app.notices
        await app.send("First")
        assert backend.requests[-1].messages[0].content == "Be brief."
        assert "▸ System prompt: Be brief. · 1 line (F7)" in app.screen_text
        assert app.prompt.border_title == "Message"

        app.conversation.meter.predicted(Reach(compute_tok_s=100.0))
        await app.press("alt+s")
        await app.until(lambda: app.prompt.text == "Be brief.")
        await app.run("Sing.")
        await app.shows("▸ System prompt: Sing. · 1 line (F7)")
        await app.told("reads the whole chat again: 501 tokens")
        await app.send("Second")
        assert backend.requests[-1].messages[0].content == "Sing."
        chat = app.conversation.chat
        assert chat is not None and app.conversation.history.store.chat(chat.id).system_prompt == "Sing."

        app.chat.query_one(ChatTranscript).focus()
        await app.press(*"kkkkk", "f4")  # at the system prompt F4 edits it, and not the last question
        await app.until(lambda: app.prompt.border_title == "Edit system prompt" and app.prompt.text == "Sing.")
        await app.press("escape")
        await app.until(lambda: not app.prompt.text)

        await app.press("ctrl+n")  # the next chat has none
        await app.run("/system-prompt Be kind.")
        await app.until(lambda: app.prompt.border_title == "Message · own system prompt")
        await app.send("Third")
        assert backend.requests[-1].messages[0].content == "Be kind."


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
