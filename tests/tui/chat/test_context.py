"""Tests what the chat screen does when the context is full, /compact, and the warning before."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cpuchat.chats.history import SUMMARY_TITLE
from cpuchat.protocol.messages import ContextTrimmed, Failed, ModelLoaded
from cpuchat.tui.widgets.dialogs import ChoiceScreen
from tests.support.chat_app import RunningApp, loaded
from tests.support.looking import LOOK, server_config
from tests.support.scripted_backend import MODEL, ScriptedBackend, Step, answer, calling

FULL: list[Step] = [
    Failed(code="context_full", message="The chat has 9,000 tokens.", hint="", request_id=1, n_tokens=9000)
]


async def filled(app: RunningApp) -> None:
    """Send two messages, the second of which does not fit, and wait for the question."""
    await app.send("First")
    await app.send("Second", wait=False)
    await app.opens(ChoiceScreen)
    request = app.backend.requests[-1]
    assert request.when_full == "refuse_early"
    assert "The chat has 9,000 tokens." in app.screen_text


async def summarized(app: RunningApp) -> None:
    n_system = sum(role == "system" for role, _ in app.stored())
    await app.run("/compact")
    await app.until(lambda: sum(role == "system" for role, _ in app.stored()) > n_system and not app.chat.session.busy)


async def test_a_full_chat_is_summarized_and_remembers_it() -> None:
    script = [answer("One."), FULL, answer("They said one."), answer("Two.")]
    async with loaded(ScriptedBackend(script)) as app:
        await filled(app)
        await app.press("enter")
        await app.closes()
        await app.idle(4)
        assert app.stored() == [
            ("user", "First"), ("assistant", "One."), ("user", "Second"), ("system", "They said one."),
            ("assistant", "Two."),
        ]  # fmt: skip
        last = [(message.role, message.content) for message in app.backend.requests[-1].messages]
        assert last == [("system", f"{SUMMARY_TITLE}\n\nThey said one."), ("user", "Second")]
        shown = [message for message in app.transcript.messages if message.role == "system"]
        assert [(one.title, one.content) for one in shown] == [("Summary of earlier messages", "They said one.")]
        assert app.open_chat.when_full == "compact"  # not asked again


async def test_compact_summarizes_at_any_time_and_what_it_lacks_is_told(tmp_path: Path) -> None:
    failed: list[Step] = [Failed(code="generation_failed", message="Decoding failed.", request_id=1)]
    lost: list[Step] = [
        ContextTrimmed(request_id=1, dropped_messages=3, dropped_tokens=900, n_ctx=8192),
        *answer("They said", stop_reason="max_tokens"),
    ]
    script = [FULL, answer("One."), failed, calling("", LOOK), lost, answer("Two.")]
    async with loaded(ScriptedBackend(script)) as app:
        await app.run("/compact")
        await app.told("There is nothing to summarize yet.")
        await app.send("Very long")  # a first message: there is nothing to make room for
        assert app.app.screen is app.chat
        assert "The chat has 9,000 tokens." in app.contents()[-1]
        await app.press("ctrl+n")
        await app.chat.session.start_server("eyes", server_config(tmp_path))
        await app.send("First")
        for problem in ("Decoding failed.", "called a tool in place of"):  # changes nothing
            await app.run("/compact")
            await app.told(problem)
            await app.idle()
            assert app.stored() == [("user", "First"), ("assistant", "One.")]
            assert app.contents() == ["First", "One."]
        assert app.backend.requests[-1].tools == app.backend.requests[1].tools != ()

        await summarized(app)
        [told] = [notice for notice in app.notices if notice.startswith("Summarized.")]
        assert "It is without the oldest 3 messages, which did not fit. It was cut off at 2 tokens." in told
        assert app.transcript.messages[-1].note.endswith("token limit reached") and app.prompt.text == ""
        await app.send("Second")
        assert app.backend.requests[-1].messages[0].content.endswith("They said")


async def test_the_gauge_warns_from_80_percent_on() -> None:
    small = msgspec.structs.replace(MODEL, n_ctx=1024)
    sizes = {"Fits.": 700, "Nearly full.": 840, "More.": 850, "They said more.": 900, "Again.": 860}
    script = [answer(text, prompt_n=size) for text, size in sizes.items()]
    async with loaded(ScriptedBackend(script, load_steps=[ModelLoaded(model=small)])) as app:
        await app.send("First")
        assert "! " not in app.status
        await app.send("Second")
        assert "! " in app.status
        warnings = [notice for notice in app.notices if "/compact summarizes the chat" in notice]
        assert len(warnings) == 1 and warnings[0].startswith("The context is 8")
        await app.send("Third")
        assert len([notice for notice in app.notices if "/compact" in notice]) == 1
        await summarized(app)
        assert "! " not in app.status
        await app.send("Fourth")
        assert len([notice for notice in app.notices if "/compact" in notice]) == 2  # it is full again


async def test_a_message_that_does_not_fit_alone_is_to_be_edited_and_stays_out_of_the_next_one() -> None:
    alone: list[Step] = [Failed(code="context_full", message="The last message needs 9,000 tokens.", alone=True)]
    async with loaded(ScriptedBackend([alone, answer("Two.")])) as app:
        await app.run("Very long")
        await app.shows("Edit last message")
        assert app.app.screen is app.chat
        assert "The last message needs" in app.contents()[-1]
        assert app.stored()[-1] == ("user", "Very long")
        assert app.prompt.text == "Very long"
        await app.press("escape")
        await app.until(lambda: "Edit last message" not in app.screen_text)
        await app.send("Short")
        assert [message.content for message in app.backend.requests[-1].messages] == ["Short"]
        assert app.stored() == [("user", "Very long"), ("user", "Short"), ("assistant", "Two.")]
