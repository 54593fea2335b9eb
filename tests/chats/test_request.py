"""Tests attachments and calls of tools in chats: in the store, in an export, and what the model is sent."""

from __future__ import annotations

import contextlib
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.chats.history import request_messages
from cpuchat.chats.records import Attachment
from cpuchat.chats.store import ChatStore
from cpuchat.chats.transfer import encoded, export_chat, import_chats, read_document
from cpuchat.config.settings import Settings
from cpuchat.present.chats import markdown
from cpuchat.protocol.messages import Failed, Message, ToolCall, ToolResult, ToolStep
from cpuchat.session.conversation import Conversation
from tests.chats.test_branches import asked, conversation, everything, texts
from tests.support.scripted_backend import ScriptedBackend, Step, answer

pytestmark = pytest.mark.usefixtures("measured_machine")

FILE = Attachment(mark="@a.py", title="a.py", text="one\x1b[31m\x00\n```\n")
PASTED = Attachment(mark="[Pasted text 1: 41 lines]", title="Pasted text 1", text="漢字\n" * 41)
SENT = "a.py:\n````\none\x1b[31m\x00\n```\n````\n\nWhat is @a.py?"


async def test_attachments_are_sent_before_the_message_and_again_with_each_answer() -> None:
    async with conversation("One", "Two", "Three", "Four") as core:
        await everything(core.send("What is @a.py?", attach=lambda: (FILE,)))
        assert asked(core) == [SENT]
        assert texts(core) == ["What is @a.py?", "One"]
        await everything(core.regenerate())
        assert asked(core) == [SENT]
        await everything(core.send("And?"))
        assert asked(core) == [SENT, "Two", "And?"]
        await everything(core.edit("And @a.py?", attach=lambda: (PASTED,)))
        assert asked(core)[-1].startswith("Pasted text 1:\n```\n漢字")
        assert texts(core)[-2] == "And @a.py?"
        assert [message.attachments for message in core.messages] == [(FILE,), (), (PASTED,), ()]


def too_long() -> list[Step]:
    return [Failed(code="context_full", message="The last message needs 9,000 tokens.", hint="Shorten it.", alone=True)]


@pytest.mark.parametrize("stored", [True, False])
async def test_a_message_that_was_too_long_is_not_sent_with_the_next_one(stored: bool) -> None:
    backend = ScriptedBackend([answer("One"), too_long(), answer("Two"), too_long(), answer("Three")])
    store = ChatStore(paths.chats_db()) if stored else None
    core = Conversation(settings=Settings(), backend=backend, store=store)
    await everything(core.send("First?"))
    await everything(core.send("Very long"))
    if stored:
        assert core.chat is not None and texts(core) == ["First?", "One", "Very long"]
        await core.open_chat(core.chat.id)
    await everything(core.send("Second?"))
    assert asked(core) == ["First?", "One", "Second?"]
    assert [one.content for one in core.messages] == ["First?", "One", "Very long", "Second?", "Two"]
    await everything(core.send("Longer"))
    await everything(core.regenerate())  # with a larger context, say
    assert asked(core) == ["First?", "One", "Second?", "Two", "Longer"]
    await core.close()


def test_an_export_has_attachments_and_gives_them_back(tmp_path: Path) -> None:
    store, other = ChatStore(tmp_path / "chats.db"), ChatStore(tmp_path / "other.db")
    chat = store.create_chat("Qwen")
    half = Attachment(title="half", text="\ud83d")  # of a surrogate pair
    store.add_message(chat.id, "user", "Why?", attachments=(FILE, PASTED, half))
    whole = export_chat(store, store.chat(chat.id))
    file = tmp_path / "chats.json"
    file.write_bytes(encoded([whole]))
    import_chats(other, read_document(file))
    (message,) = other.messages(chat.id)
    assert message.attachments == (FILE, PASTED, Attachment(title="half", text="?"))
    text = markdown(whole)
    assert "<details><summary>a.py</summary>\n\n````\none␛[31m␀\n```\n````\n\n</details>" in text
    assert text.index("</details>") < text.index("Why?")
    store.close()
    other.close()


@pytest.mark.parametrize("value", ["[1]", '[{"title": 1, "text": "x"}]', 7, b"\xff", "[" * 5000])
def test_attachments_that_make_no_sense_do_not_cost_the_message(value: object) -> None:
    with closing(ChatStore(paths.chats_db())) as store:
        chat = store.create_chat("Qwen")
        store.add_message(chat.id, "user", "Why?", attachments=(FILE,))
    with contextlib.closing(sqlite3.connect(paths.chats_db())) as db:
        db.execute("UPDATE messages SET attachments = ?", (value,))
        db.commit()
    with closing(ChatStore(paths.chats_db())) as store:
        assert [(one.content, one.attachments) for one in store.messages(chat.id)] == [("Why?", ())]


def test_calls_of_tools_are_kept_exported_and_sent_again(tmp_path: Path) -> None:
    store, other = ChatStore(tmp_path / "chats.db"), ChatStore(tmp_path / "other.db")
    call = ToolCall(name="look", arguments={"at": "ü", "more": [1, None]}, id="c00000001")
    step = ToolStep(said="Let me look.", calls=(call, call), results=(ToolResult(text="seen\n```"),))
    chat = store.create_chat("Qwen")
    store.add_message(chat.id, "user", "What is it?")
    answer = store.add_message(chat.id, "assistant", "", steps=(step,))
    store.update_message(answer.id, content="It.", steps=(step, step))
    question, answer = store.messages(chat.id)
    assert answer.steps == (step, step) and question.steps == ()
    once = (
        Message(role="assistant", content="Let me look.", calls=(call,)),  # the second call was not made
        Message(role="tool", content="seen\n```", call_id="c00000001", tool="look"),
    )
    sent = request_messages("", [question, answer])
    assert sent == (Message(role="user", content="What is it?"), *once, *once, Message(role="assistant", content="It."))
    whole = export_chat(store, store.chat(chat.id))
    file = tmp_path / "chats.json"
    file.write_bytes(encoded([whole]))
    import_chats(other, read_document(file))
    assert other.messages(chat.id)[1].steps == (step, step)
    text = markdown(whole)
    assert '<details><summary>look</summary>\n\n````\n{"at": "ü", "more": [1, null]}\n\nseen\n```\n````' in text
    assert text.index("Let me look.") < text.index("</details>") < text.index("It.")
    store.close()
    other.close()
