"""Tests summaries of chats that outgrow the context, and what a chat does when it is full, with a real store."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.chats.history import SUMMARY_TITLE
from cpuchat.protocol.messages import Failed, TextDelta
from cpuchat.session.conversation import Conversation
from tests.chats.test_branches import conversation, everything, texts
from tests.support.scripted_backend import Gate, Step, answer

pytestmark = pytest.mark.usefixtures("measured_machine")

FULL = Failed(code="context_full", message="The chat has 9,000 tokens.", request_id=1, n_tokens=9000)


@contextlib.asynccontextmanager
async def briefly(*answers: list[Step] | str) -> AsyncIterator[Conversation]:
    async with conversation(*answers) as core:
        core.settings.chat.system_prompt = "Be brief."
        yield core


def asked(core: Conversation) -> list[tuple[str, str]]:
    """Return what the model was asked last."""
    return [(message.role, message.content) for message in core.backend.requests[-1].messages]


async def test_a_summary_stands_for_what_comes_before() -> None:
    async with briefly("One.", "They said one.", "Two.", "Both.", "Three.") as core:
        with pytest.raises(UsageError, match="nothing to summarize"):
            await everything(core.compact())
        await everything(core.send("First?"))
        await everything(core.compact())
        assert asked(core)[:3] == [("system", "Be brief."), ("user", "First?"), ("assistant", "One.")]
        assert asked(core)[3][1].startswith("Summarize the messages above")
        assert texts(core) == ["First?", "One.", "They said one."] and core.messages[-1].is_summary
        assert core.messages[-1].timings is not None and core.history.n_past == 3  # tokens of the summary
        with pytest.raises(UsageError, match="summarized already"):
            await everything(core.compact())

        await everything(core.send("Second?"))
        system = f"Be brief.\n\n{SUMMARY_TITLE}\n\nThey said one."
        assert asked(core) == [("system", system), ("user", "Second?")]
        await everything(core.compact())  # of the summary and what followed
        assert asked(core)[:3] == [("system", system), ("user", "Second?"), ("assistant", "Two.")]

        await everything(core.send("Third?"))
        assert asked(core) == [("system", f"Be brief.\n\n{SUMMARY_TITLE}\n\nBoth."), ("user", "Third?")]


async def test_an_unanswered_question_is_not_part_of_its_summary() -> None:
    async with briefly("One.", [FULL], "They said one.", "Two.", "Two again.") as core:
        await everything(core.send("First?"))
        assert isinstance((await everything(core.send("Second?")))[-1], Failed)
        await everything(core.compact())
        assert [content for _, content in asked(core)][1:-1] == ["First?", "One."]
        await everything(core.regenerate())
        short = [("system", f"Be brief.\n\n{SUMMARY_TITLE}\n\nThey said one."), ("user", "Second?")]
        assert asked(core) == short
        assert texts(core) == ["First?", "One.", "Second?", "They said one.", "Two."]
        two = core.messages[-1]
        await everything(core.regenerate(two.id))
        assert asked(core) == short
        assert core.history.tree.siblings(two.id) == [two.id, core.messages[-1].id]


async def test_a_summary_is_deleted_without_what_follows_and_put_back() -> None:
    async with briefly("One.", "They said one.", "Two.", "Three.") as core:
        await everything(core.send("First?"))
        await everything(core.compact())
        summary = core.messages[-1]
        await everything(core.send("Second?"))
        whole = texts(core)
        await core.delete_message(summary.id)
        assert texts(core) == ["First?", "One.", "Second?", "Two."]
        deleted = await core.history.undo_delete()
        await core.open_chat(deleted.chat_id, deleted.message_id)
        assert texts(core) == whole
        await core.delete_message(summary.id)
        await everything(core.send("Third?"))
        assert [content for _, content in asked(core)] == ["Be brief.", "First?", "One.", "Second?", "Two.", "Third?"]


async def test_a_summary_that_was_stopped_is_not_kept() -> None:
    gate = Gate()
    async with briefly("One.", answer("They said", gate=gate)) as core:
        await everything(core.send("First?"))
        async for event in core.compact():
            if isinstance(event, TextDelta):
                await core.stop()
        assert texts(core) == ["First?", "One."]


@pytest.mark.parametrize(
    ("choice", "asks", "refuses"),
    [("", False, False), ("", True, True), ("drop", True, False), ("compact", False, True), ("stop", False, True)],
)
async def test_a_chat_knows_what_to_do_when_it_is_full(choice: str, asks: bool, refuses: bool) -> None:
    async with briefly("One.", "Two.", "Three.") as core:
        core.asks_when_full = asks
        await everything(core.send("First?"))
        assert core.backend.requests[-1].when_full == "drop"  # there is nothing to leave out
        await core.history.set_options(when_full=choice)
        await core.open_chat(core.chat.id)
        assert core.chat.when_full == choice
        await everything(core.send("Second?"))
        assert core.backend.requests[-1].when_full == ("refuse_early" if refuses else "drop")
        await everything(core.edit("Something else?"))  # no summary can follow a question that is not stored
        assert (core.backend.requests[-1].when_full == "drop") == (choice != "stop")
