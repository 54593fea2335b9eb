"""Tests edits of a chat's system prompt and of an answer."""

from __future__ import annotations

from cpuchat.config.presets import Preset, save_preset
from cpuchat.telemetry.roofline import Reach
from tests.support.chat_app import SMALL, running
from tests.support.scripted_backend import ScriptedBackend, answer
from tests.tui.chat.test_branches import select, shown


async def test_a_chats_system_prompt_is_edited_and_what_that_costs_is_said() -> None:
    backend = ScriptedBackend([answer("One.", prompt_n=500), answer("Two.")])
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
        await select(app, 0)
        await app.press("f4")  # it is the first row
        await app.until(lambda: app.prompt.text == "Be brief.")
        await app.write("Sing.")
        await app.press("enter")
        await app.until(lambda: "▸ System prompt: Sing. · 1 line (F7)" in app.screen_text)
        assert any("reads the whole chat again: 501 tokens" in notice for notice in app.notices)
        await app.send("Second")
        assert backend.requests[-1].messages[0].content == "Sing."
        chat = app.conversation.chat
        assert chat is not None and app.conversation.history.store.chat(chat.id).system_prompt == "Sing."

        await app.press("ctrl+n")  # the next chat has none
        await app.write("/system-prompt Be kind.")
        await app.press("enter")
        await app.until(lambda: app.prompt.border_title == "Message · own system prompt")
        await app.send("Third")
        assert backend.requests[-1].messages[0].content == "Be kind."


async def test_an_empty_system_prompt_replaces_that_of_the_preset() -> None:
    save_preset(Preset(name="warm", system_prompt="Sing."))
    backend = ScriptedBackend([answer("One."), answer("Two.")])
    async with running(backend) as app:
        await app.ready()
        await app.write("/preset warm")
        await app.press("enter")
        await app.until(lambda: app.prompt.border_title == "Message · warm")
        await app.send("First")
        await app.write("/system-prompt")
        await app.press("enter")
        await app.until(lambda: app.prompt.text == "Sing.")
        await app.press("escape")  # leaves it as it is
        await app.until(lambda: not app.prompt.text)
        assert "System prompt of preset warm: Sing." in app.screen_text
        await app.press("alt+s")
        await app.until(lambda: app.prompt.text == "Sing.")
        app.prompt.clear()
        await app.press("enter")
        await app.until(lambda: "▸ System prompt" not in app.screen_text and not app.chat._composer.editing)
        await app.send("Second")
        assert [message.role for message in backend.requests[-1].messages] == ["user", "assistant", "user"]
        assert app.conversation.preset.name == "warm"


async def test_an_edited_answer_is_a_new_branch_that_the_next_question_follows() -> None:
    backend = ScriptedBackend([answer("One."), answer("Two.")])
    async with running(backend) as app:
        await app.ready()
        await app.send("First")
        await select(app, 1)
        await app.press("f4")
        assert app.prompt.text == "One." and app.prompt.border_title == "Edit answer"
        assert app.prompt.border_subtitle == "Enter saves as a new branch · Esc cancels"
        await app.write("Uno.")
        await app.press("enter")
        await app.until(lambda: shown(app) == ["First", "Uno."])
        assert app.transcript.messages[-1].place == "2/2" and app.transcript.messages[-1].note.endswith("edited")
        assert len(backend.requests) == 1  # nothing is generated
        await app.send("Second")
        assert [message.content for message in backend.requests[-1].messages] == ["First", "Uno.", "Second"]
        assert app.stored() == [("user", "First"), ("assistant", "Uno."), ("user", "Second"), ("assistant", "Two.")]
        await select(app, 1)
        await app.press("left")
        await app.until(lambda: shown(app) == ["First", "One."])
