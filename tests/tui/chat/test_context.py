"""Tests what the chat screen does when the context is full, /compact, and the warning before."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat.chats.history import SUMMARY_TITLE
from cpuchat.protocol.messages import ContextTrimmed, Failed, ModelLoaded
from cpuchat.session.conversation import Conversation
from cpuchat.tui.widgets.dialogs import ChoiceScreen
from tests.support.chat_app import RunningApp, running
from tests.support.scripted_backend import MODEL, READ, ScriptedBackend, Step, answer, calling
from tests.tui.chat.test_branches import select

FULL: list[Step] = [
    Failed(code="context_full", message="The chat has 9,000 tokens.", hint="", request_id=1, n_tokens=9000)
]


async def filled(app: RunningApp) -> None:
    """Send two messages, the second of which does not fit, and wait for the question."""
    await app.ready()
    await app.send("First")
    await app.send("Second", wait=False)
    await app.until(lambda: isinstance(app.app.screen, ChoiceScreen))
    request = app.backend.requests[-1]
    assert request.when_full == "refuse_early"
    assert "The chat has 9,000 tokens." in app.screen_text


async def chosen(app: RunningApp, *keys: str) -> None:
    await app.press(*keys, "enter")
    await app.until(lambda: app.app.screen is app.chat)


async def test_a_full_chat_is_summarized_and_remembers_it() -> None:
    script = [answer("One."), FULL, answer("They said one."), answer("Two."), FULL, answer("All."), answer("Three.")]
    async with running(ScriptedBackend(script)) as app:
        await filled(app)
        await chosen(app)
        await app.until(lambda: len(app.backend.requests) == 4 and not app.chat.busy)
        assert app.stored() == [
            ("user", "First"), ("assistant", "One."), ("user", "Second"), ("system", "They said one."),
            ("assistant", "Two."),
        ]  # fmt: skip
        last = [(message.role, message.content) for message in app.backend.requests[-1].messages]
        assert last == [("system", f"{SUMMARY_TITLE}\n\nThey said one."), ("user", "Second")]
        shown = [message for message in app.transcript.messages if message.role == "system"]
        assert [(one.title, one.content) for one in shown] == [("Summary of earlier messages", "They said one.")]

        await app.send("Third", wait=False)  # not asked again
        await app.until(lambda: len(app.backend.requests) == 7 and not app.chat.busy)
        assert app.stored()[-3:] == [("user", "Third"), ("system", "All."), ("assistant", "Three.")]


async def test_the_oldest_turns_are_left_out_when_that_is_chosen() -> None:
    async with running(ScriptedBackend([answer("One."), FULL, answer("Two."), answer("Three.")])) as app:
        await filled(app)
        await chosen(app, "right")
        await app.until(lambda: len(app.backend.requests) == 3 and not app.chat.busy)
        assert app.backend.requests[-1].when_full == "drop"
        assert app.stored()[-1] == ("assistant", "Two.")
        await app.send("Third")
        assert app.backend.requests[-1].when_full == "drop" and app.stored()[-1] == ("assistant", "Three.")


@pytest.mark.parametrize("keys", [("right", "right", "enter"), ("escape",)])
async def test_nothing_is_sent_when_the_chat_stops_or_the_question_is_closed(keys: tuple[str, ...]) -> None:
    async with running(ScriptedBackend([answer("One."), FULL])) as app:
        await filled(app)
        await app.press(*keys)
        await app.until(lambda: app.app.screen is app.chat)
        assert len(app.backend.requests) == 2 and not app.chat.busy
        assert app.stored()[-1] == ("user", "Second")
        wanted = "stop" if "enter" in keys else ""
        await app.until(lambda: app.conversation.chat is not None and app.conversation.chat.when_full == wanted)


async def test_a_summary_is_asked_for_with_the_tools_of_the_chat_and_is_no_call(tmp_path: Path) -> None:
    backend = ScriptedBackend([answer("One."), calling("", READ)])
    async with running(backend) as app:
        await app.ready()
        app.chat.session.offer_folder(tmp_path)
        await app.send("First")
        app.chat.commands.compact()
        await app.until(lambda: any("called a tool in place of" in notice for notice in app.notices))
        assert backend.requests[1].tools == backend.requests[0].tools != ()
        assert app.stored() == [("user", "First"), ("assistant", "One.")]


async def test_compact_summarizes_at_any_time_and_the_summary_is_edited() -> None:
    backend = ScriptedBackend([answer("One."), answer("They said one."), answer("Two.")])
    async with running(backend) as app:
        await app.ready()
        await app.write("/compact")
        await app.press("enter")
        await app.until(lambda: "There is nothing to summarize yet." in app.notices)
        await app.send("First")
        await app.write("/compact")
        await app.press("enter")
        await app.until(lambda: len(backend.requests) == 2 and not app.chat.busy)
        assert app.stored()[-1] == ("system", "They said one.") and app.prompt.text == ""

        await select(app, 2)
        await app.press("f4")
        assert app.prompt.text == "They said one."
        await app.press("!", "enter")
        await app.until(lambda: app.stored()[-1] == ("system", "They said one.!"))
        await app.until(lambda: app.transcript.messages[-1].content == "They said one.!")
        await app.send("Second")
        assert backend.requests[-1].messages[0].content.endswith("They said one.!")


async def test_a_first_message_that_is_too_long_is_an_error_and_a_summary_that_fails_changes_nothing() -> None:
    failed: list[Step] = [Failed(code="generation_failed", message="Decoding failed.", request_id=1)]
    async with running(ScriptedBackend([FULL, answer("One."), failed])) as app:
        await app.ready()
        await app.send("Very long")
        assert app.app.screen is app.chat
        assert "The chat has 9,000 tokens." in app.transcript.messages[-1].content
        await app.press("ctrl+n")
        await app.until(lambda: not app.transcript.messages)
        await app.send("First")
        await app.write("/compact")
        await app.press("enter")
        await app.until(lambda: "Decoding failed." in app.notices and not app.chat.busy)
        assert app.stored() == [("user", "First"), ("assistant", "One.")]
        assert [message.content for message in app.transcript.messages] == ["First", "One."]


async def test_the_gauge_warns_from_80_percent_on() -> None:
    small = msgspec.structs.replace(MODEL, n_ctx=1024)
    sizes = {"Fits.": 700, "Nearly full.": 840, "More.": 850, "They said more.": 900, "Again.": 860}
    script = [answer(text, prompt_n=size) for text, size in sizes.items()]
    async with running(ScriptedBackend(script, load_steps=[ModelLoaded(model=small)])) as app:
        await app.ready()
        await app.send("First")
        assert "! " not in app.status
        await app.send("Second")
        assert "! " in app.status
        warnings = [notice for notice in app.notices if "/compact summarizes the chat" in notice]
        assert len(warnings) == 1 and warnings[0].startswith("The context is 8")
        await app.send("Third")
        assert len([notice for notice in app.notices if "/compact" in notice]) == 1
        await app.write("/compact")
        await app.press("enter")
        await app.until(lambda: app.stored()[-1][0] == "system" and not app.chat.busy)
        assert "! " not in app.status
        await app.send("Fourth")
        assert len([notice for notice in app.notices if "/compact" in notice]) == 2  # it is full again


async def test_what_a_summary_lacks_is_told() -> None:
    lost: list[Step] = [
        ContextTrimmed(request_id=1, dropped_messages=3, dropped_tokens=900, n_ctx=8192),
        *answer("They said", stop_reason="max_tokens"),
    ]
    async with running(ScriptedBackend([answer("One."), lost])) as app:
        await app.ready()
        await app.send("First")
        await app.write("/compact")
        await app.press("enter")
        await app.until(lambda: any(notice.startswith("Summarized.") for notice in app.notices))
        [told] = [notice for notice in app.notices if notice.startswith("Summarized.")]
        assert "The oldest 3 messages did not fit and are not in the summary. It was cut off at 2 tokens." in told
        assert app.transcript.messages[-1].note.endswith("token limit reached")


async def test_a_message_that_is_too_long_even_alone_is_not_tried_again() -> None:
    async with running(ScriptedBackend([answer("One."), FULL, FULL])) as app:
        await filled(app)
        await chosen(app, "right")
        await app.until(lambda: len(app.backend.requests) == 3 and not app.chat.busy)
        await app.pilot.pause()
        assert app.app.screen is app.chat and len(app.backend.requests) == 3
        assert app.transcript.messages[-1].title == "Context full"


async def test_a_message_that_does_not_fit_alone_is_edited_so_that_the_next_one_does_not_contain_it() -> None:
    alone: list[Step] = [Failed(code="context_full", message="The last message needs 9,000 tokens.", alone=True)]
    async with running(ScriptedBackend([alone, answer("One.")])) as app:
        await app.ready()
        await app.write("Very long")
        await app.press("enter")
        await app.until(lambda: "Edit last message" in app.screen_text)
        assert app.app.screen is app.chat
        assert "The last message needs" in app.transcript.messages[-1].content
        assert app.stored()[-1] == ("user", "Very long")
        assert app.prompt.text == "Very long"
        await app.write("Short")
        await app.press("enter")
        await app.until(lambda: len(app.backend.requests) == 2 and not app.chat.busy)
        assert [message.content for message in app.backend.requests[-1].messages] == ["Short"]
        assert app.prompt.text == ""


async def test_a_message_that_does_not_fit_alone_stays_out_of_the_next_one_when_its_edit_is_cancelled() -> None:
    alone: list[Step] = [Failed(code="context_full", message="The last message needs 9,000 tokens.", alone=True)]
    async with running(ScriptedBackend([alone, answer("One.")])) as app:
        await app.ready()
        await app.write("Very long")
        await app.press("enter")
        await app.until(lambda: "Edit last message" in app.screen_text)
        await app.press("escape")
        await app.until(lambda: "Edit last message" not in app.screen_text)
        await app.send("Short")
        assert [message.content for message in app.backend.requests[-1].messages] == ["Short"]
        assert app.stored() == [("user", "Very long"), ("user", "Short"), ("assistant", "One.")]


async def test_an_edited_summary_is_saved_without_a_model() -> None:
    def summarized(conversation: Conversation) -> None:
        store = conversation.history.store
        chat = store.create_chat("m", title="Old")
        store.add_message(chat.id, "user", "First")
        store.add_message(chat.id, "assistant", "One.", model="m", stop_reason="end")
        store.add_message(chat.id, "system", "They said one.", model="m")

    async with running(model=None, prepare=summarized) as app:
        [chat] = app.conversation.history.store.chats()
        app.chat.open_chat(chat.id)
        await app.until(lambda: len(app.transcript.messages) == 3)
        await select(app, 2)
        await app.press("f4", "!", "enter")
        await app.until(lambda: app.stored()[-1] == ("system", "They said one.!"))
        assert app.prompt.text == "" and app.chat.conversation.model is None
